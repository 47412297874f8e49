"""Real vLLM engines on this machine's CPU: their environment, their model, their lives."""
