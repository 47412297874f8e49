"""`analyze league`: policies compared in virtual time."""
