"""Messages between frontends and workers, and the ZMQ sockets that carry them."""
