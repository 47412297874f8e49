"""`replay`: send the requests of a trace to a target on schedule, and record the answers."""
