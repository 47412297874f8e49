"""vLLM's OpenAI API, as far as the simulator serves it."""
