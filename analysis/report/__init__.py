"""`analyze report` and `compare`: the summary of a run, as tables and as a page."""
