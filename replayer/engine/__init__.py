"""A model of a vLLM engine: scheduler, KV cache, transfers, costs. Pure: times are arguments."""
