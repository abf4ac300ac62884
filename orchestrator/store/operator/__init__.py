"""Lists that operators change while a fleet runs, and that its processes follow."""
