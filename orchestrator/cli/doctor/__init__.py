"""`orchestrator doctor`: checks of this host, of a fleet's Redis, and of the path between two workers."""
