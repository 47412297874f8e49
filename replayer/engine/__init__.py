"""A model of a vLLM engine: scheduler, KV cache, hand-overs, costs. Pure; the clock is given."""
