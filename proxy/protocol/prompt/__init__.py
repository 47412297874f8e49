"""The prompt of a body: what of it an engine renders, and the facts that decisions need of it."""
