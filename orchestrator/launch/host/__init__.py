"""This machine: its cores and GPUs, its processes, the folder of a fleet that runs here, and the fleet's own Redis."""
