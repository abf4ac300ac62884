"""KV connectors: the code that runs inside vLLM's engine and moves KV blocks between engines."""
