"""The project as others install it: `make test-install`, which needs pip's package index."""
