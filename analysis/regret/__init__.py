"""`analyze regret`: how much better an oracle does that tries every action at each decision."""
