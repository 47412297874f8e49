"""The router and N engine models in virtual time."""
