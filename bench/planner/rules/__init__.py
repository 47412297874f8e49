"""Scaling rules: how the replay asks one, the autoscaler of Kubernetes, the rivals."""
