"""What requests are called by their clients: names of sessions, ids of stored responses."""
