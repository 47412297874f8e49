"""What is read of the GPUs behind the instances: one module per kind of sensor."""
