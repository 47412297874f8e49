"""Streams of events: as they pass, and what it takes to go on with one elsewhere."""
