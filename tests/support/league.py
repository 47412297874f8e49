"""A small load from the sample trace."""

from replayer.virtual.arrivals import LoadRules

RULES = LoadRules(rate=0.2, horizon_s=120.0, think_cap_s=5.0)
