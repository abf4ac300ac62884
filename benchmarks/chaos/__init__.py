"""Faults under streaming load: what clients see of each, whether every token is right, and how long it takes to heal.

`table` has one row for each fault, the faults themselves are in the files named `*_faults`, `fleets` starts what they
happen to, `load` has the clients, and `report` says whether a row held.
"""
