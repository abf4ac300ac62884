"""KV push connector: the prefill engine WRITEs KV blocks into the decode engine's memory over NIXL.

vLLM loads `connector.py`, the facade. `scheduler.py` decides what is registered and shipped. `worker.py` makes the
NIXL calls, through `connections.py` and `writer.py`. `inbound.py` and `outbound.py` are the state machines of the two
ends, over the tables in `states.py`; `records.py` holds what they know of one request. They need neither vLLM, nor
NIXL, nor a clock, and the simulated engine runs them too. `blocks/` has which blocks are sent, and into which.
"""
