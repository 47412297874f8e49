"""What replicas of one proxy tell each other of a fleet: the form, what is said, what is heard."""
