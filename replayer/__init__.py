"""Simulated engines, trace replay and the client that measures the proxy."""
