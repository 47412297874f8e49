"""GPU sensors of the instances: one module per kind."""
