"""Admission of requests: busy thresholds, wait queue, Retry-After, memory."""
