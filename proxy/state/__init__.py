"""State that outlives a request, one file per owner."""
