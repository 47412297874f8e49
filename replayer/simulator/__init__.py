"""`engine-sim`: the engine model behind vLLM's HTTP API."""
