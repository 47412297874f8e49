"""Network code for both sides: timeouts, addresses, TLS, sockets."""
