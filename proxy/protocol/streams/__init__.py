"""Streams of events: their scan as they pass, and their migration."""
