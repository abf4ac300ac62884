"""A discrete-event simulator of whole fleets that runs the very functions of `orchestrator.policy`.

Simulated time only: no sockets, no Redis, no engine. What it is not: the `sim` engine (`workers/sim/engine.py`), which
is a real worker process with a timed engine inside.
"""
