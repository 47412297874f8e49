"""What a run leaves in words: verdicts, tables, the published figures and their chart."""
