"""KV push connector: the prefill engine WRITEs KV blocks into the decode engine's memory over NIXL.

`connector.py` is the facade vLLM loads; `scheduler.py` decides what is registered and shipped; `worker.py` does
the NIXL calls over `links.py` and `writer.py`; `inbound.py` and `outbound.py` are the two ends' state machines,
without vLLM, NIXL or a clock, over the tables in `states.py`; `stream.py` is what the latter knows of one request.
"""
