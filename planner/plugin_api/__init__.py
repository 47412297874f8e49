"""Plugins of the planner that are other processes: who they are, and how they are asked."""
