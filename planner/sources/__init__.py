"""Where a tick's observations come from."""
