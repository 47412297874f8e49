"""Trace files: typed rows, and a loader for each known format."""
