"""The admin paths: health, instances, sessions, decisions, busy thresholds."""
