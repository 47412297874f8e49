"""The planner: a process beside the proxies that decides how many instances keep the SLO."""
