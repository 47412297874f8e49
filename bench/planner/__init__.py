"""Planners judged in NVIDIA Dynamo's discrete-event replay: `make bench-planner`."""
