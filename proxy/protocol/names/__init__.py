"""Clients' names in requests: session names, ids of stored responses."""
