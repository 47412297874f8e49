"""The router and N engine models on one virtual clock."""
