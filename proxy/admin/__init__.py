"""Handlers of the admin paths: health, instances, sessions, decisions, busy thresholds."""
