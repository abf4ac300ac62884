"""A discrete-event simulator of whole fleets that runs the code of `orchestrator.policy`.

Time is simulated, and there are no sockets, no Redis and no engines. The `sim` engine (`workers/sim/`) is something
else: a real worker process around an engine with modelled step times.
"""
