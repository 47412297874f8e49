"""What is told to operators' tools: metrics, the request log, the log on stderr."""
