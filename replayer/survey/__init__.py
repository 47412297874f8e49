"""Commands of `replay` about a trace's file: they read it and send nothing."""
