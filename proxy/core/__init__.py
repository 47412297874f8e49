"""Decisions, pure: values and `now_s` in, values out; no IO, no clock, no random."""
