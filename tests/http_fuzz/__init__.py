"""Hostile HTTP requests, made from a server's own schema, to a fleet that serves others beside them.

`make fuzz` sends 20,000; some hundreds are part of `make test` (`tests/e2e/test_sim_fuzz.py`). A 5xx counts against the
fleet unless a plain vLLM server answers the same request so.
"""
