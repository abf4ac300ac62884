"""Faults under streaming load: what clients see of each, whether every token is right, and how long it takes to heal.

`table` has one row for each fault, the files named `*_faults` have the faults, `fleets` starts the fleets, `load` has
the clients, and `report` decides whether a row held.
"""
