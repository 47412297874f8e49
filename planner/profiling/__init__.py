"""The self-benchmark: measures what one idle instance takes, and makes a profile of it."""
