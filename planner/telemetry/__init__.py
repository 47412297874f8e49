"""What the planner shows of itself: metrics, audit, report."""
