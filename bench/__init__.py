"""What is measured beside the product: cost, routing quality, and what faults and restarts lose."""
