"""Traces: spans of requests and of their legs, sent to a collector (`--otlp-endpoint`)."""
