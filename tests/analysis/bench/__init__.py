"""What experiments are made of."""
