"""The router with N engine models in virtual time."""
