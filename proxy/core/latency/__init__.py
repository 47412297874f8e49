"""Times of prefill, decode steps and transfers, learned while serving; SLO targets."""
