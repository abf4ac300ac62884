"""vLLM's engine under a worker, and what of it is mended. vLLM is imported here, and nowhere else in this package."""
