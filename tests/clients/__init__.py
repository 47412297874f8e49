"""Real agents in front of the proxy: `make test-clients`, which needs npm's package index."""
