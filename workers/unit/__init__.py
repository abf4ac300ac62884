"""A worker as a part of its unit: how that begins, changes its role, and ends."""
