"""What carries decisions out: one way for each orchestrator."""
