"""`replay`: a trace against a target, with its schedule, prompts and report."""
