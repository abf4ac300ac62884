"""Decisions as pure functions over frozen structs: no clock, no I/O, no state but what the caller holds.

The router and the simulator call the very same functions.
"""
