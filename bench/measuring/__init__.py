"""One window of a measurement: the peers, their engine, the load, and what it cost."""
