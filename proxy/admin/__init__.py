"""What operators ask."""
