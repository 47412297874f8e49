"""The contents of the caches: prefixes, prompts in flight, sessions, free KV."""
