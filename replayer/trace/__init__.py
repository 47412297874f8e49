"""Traces: rows, and loaders from each known format."""
