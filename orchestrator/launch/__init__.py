"""Starts and supervises a fleet, on one machine or a Ray cluster, and keeps the workers at the desired ratio."""
