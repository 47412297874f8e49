"""Bytes and JSON to meaning and back: framing, headers, bodies, streams, errors. Pure."""
