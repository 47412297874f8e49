"""Heat of GPUs: readings in, limits on what an instance is given out. Simulated plants only."""
