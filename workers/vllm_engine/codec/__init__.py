"""What passes between a worker and vLLM: requests, with their adapters, and outputs."""
