"""What faults, hostile requests and restarts lose under load; made of the parts of tests/chaos."""
