"""`analyze regret`: what every other action would have led to."""
