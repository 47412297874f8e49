"""What an operator says to the planner."""
