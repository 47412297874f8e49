"""The KV events that engines publish: ZeroMQ's protocol, and vLLM's batches of events in it."""
