"""What the launcher decides: pure functions, without I/O or clock."""
