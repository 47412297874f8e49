"""`make demo`: simulated engines, the proxy and a replay as processes, and checks of the run."""
