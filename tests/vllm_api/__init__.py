"""vLLM's own server tests, run against a fleet and against a plain server: `make test-vllm-api`."""
