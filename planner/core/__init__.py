"""The planner's decisions, as pure functions and state: no IO, no clock, no logging."""
