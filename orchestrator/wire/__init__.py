"""What frontends and workers say to each other, and the ZMQ sockets that carry it."""
