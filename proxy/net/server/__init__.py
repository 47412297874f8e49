"""HTTP from clients."""
