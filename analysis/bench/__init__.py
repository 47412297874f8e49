"""What every experiment of `analyze` is made of."""
