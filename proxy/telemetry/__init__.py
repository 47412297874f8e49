"""Telemetry: metrics, the request log, the log on stderr."""
