"""`analyze check`: a run through sockets against its own prediction."""
