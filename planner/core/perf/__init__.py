"""How long an instance takes, learned from iterations and profiles, and what it can carry."""
