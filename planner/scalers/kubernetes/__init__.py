"""Kubernetes as a scaler: replicas of an object are set, and who goes is drained before."""
