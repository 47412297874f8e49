"""vLLM's OpenAI API as the simulator speaks it."""
