"""Trace replay against the proxy, and simulated vLLM engines to replay against."""
