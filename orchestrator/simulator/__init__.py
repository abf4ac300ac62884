"""A discrete-event simulator of whole fleets that runs the code of `orchestrator.policy`.

Simulated time only: no sockets, no Redis, no engine. Not to be confused with the `sim` engine (`workers/sim/`), which
is a real worker process around a timed engine.
"""
