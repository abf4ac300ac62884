"""The part of the system that decides: routing, queueing, membership, launching.

A request enters through `frontend`. `router` moves it from state to state, and `fleet` is what a frontend knows of the
workers. A remote prefill waits in the queue of `store`, where all processes are registered too. Decisions are pure
functions in `policy`; `launch` starts and supervises the processes.
"""
