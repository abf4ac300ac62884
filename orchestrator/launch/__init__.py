"""Starts and supervises a fleet on one machine, and makes what runs equal to the desired ratio."""
