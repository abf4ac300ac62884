"""A shorter path for the requests that most clients send, with the same answers as vLLM's server."""
