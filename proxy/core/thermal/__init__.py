"""Thermal control: readings of GPUs in, limits of instances out. Simulated plants only."""
