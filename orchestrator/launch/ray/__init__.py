"""Runs a fleet on a Ray cluster: Ray places processes and reports lost nodes; the launcher does everything else."""
