"""What most clients ask, answered as vLLM's server answers it with less on the way."""
