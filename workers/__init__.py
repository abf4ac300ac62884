"""A worker process: an agent that speaks to frontends and Redis, around one engine.

`main` is the command line, `agent` the process's life, `claims` the prefill loop, and `engine` the seam
behind which `vllm_engine` (real) and `sim` (timed, simulated) stand.
"""
