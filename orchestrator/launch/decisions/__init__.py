"""The launcher's decisions, as pure functions without I/O or clock."""
