"""Reports from files: metrics, tables, HTML."""
