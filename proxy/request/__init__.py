"""One client's request, from its body to its record."""
