"""`make demo`: engines, proxy, replay, report."""
