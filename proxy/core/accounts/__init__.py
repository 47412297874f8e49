"""Accounts: one object for each process of an engine, with what was charged, reported, learned."""
