"""This machine: what it has room for, its processes, the folder of a fleet that runs here, and its own Redis."""
