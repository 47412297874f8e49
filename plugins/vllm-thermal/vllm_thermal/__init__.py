"""A vLLM scheduler whose cap of running requests can be changed while it runs."""
