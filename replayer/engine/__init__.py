"""A model of a vLLM engine: scheduler, KV cache, hand-overs, costs. Pure: times are arguments."""
