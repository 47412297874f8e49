"""HTTP to one instance."""
