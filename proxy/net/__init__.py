"""The network, as both sides use it: timeouts, addresses, TLS, sockets."""
