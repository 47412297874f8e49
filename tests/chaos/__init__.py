"""Faults injected between the proxy and its instances, and what must hold after each."""
