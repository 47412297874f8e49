"""The project's own benchmark: what a proxy costs, side by side with its peers."""
