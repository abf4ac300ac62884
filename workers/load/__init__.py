"""What a worker tells of its load, and the ranks of a group each other."""
