"""Policies: the choice of instances for prefill and decode."""
