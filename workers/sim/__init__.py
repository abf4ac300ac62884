"""The simulated engine: real processes, sockets and messages around an engine that only counts time and blocks."""
