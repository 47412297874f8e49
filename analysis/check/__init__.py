"""`analyze check`: a run through real sockets compared with its prediction in virtual time."""
