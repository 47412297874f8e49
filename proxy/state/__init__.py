"""What outlives a request, one file per owner."""
