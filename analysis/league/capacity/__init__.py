"""What a fleet can carry, in virtual time: past saturation, and up to an SLO."""
