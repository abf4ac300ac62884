"""vLLM's engine under a worker, with fixes of its defects. vLLM is imported here, and nowhere else in `workers`."""
