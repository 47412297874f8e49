"""`analyze regret`: policies compared with an oracle that tries every action at each decision."""
