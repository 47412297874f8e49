"""Whether a request may start now: busy thresholds, wait queue, Retry-After, memory."""
