"""What is cached where: prefixes, prompts in flight, sessions, free KV."""
