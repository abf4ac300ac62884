"""Runs a fleet on a Ray cluster: Ray places processes and reports lost nodes; the launcher does everything else."""

import os

# What ends after the connection does must not begin a cluster here. Ray reads it as it is imported.
os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")
