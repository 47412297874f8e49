"""Which instances may be chosen: members, health, events, retries."""
