"""A Ray cluster as the machines that a fleet runs on: Ray finds room and says when a node is gone, and nothing more."""
