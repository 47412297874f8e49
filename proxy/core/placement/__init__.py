"""Policies: where to compute a prompt and where to decode."""
