"""The part of vLLM's OpenAI API that the simulator serves."""
