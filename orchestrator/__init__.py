"""The part of the system that decides: routing, queueing, membership, launching.

One request enters through `frontend`, is walked through its states by `router`, waits in `queue`
when it is prefilled remotely, and lives on workers that `registry` and `fleet` know. What decides is
in `policy/` and is pure; what talks is at the edges.
"""
