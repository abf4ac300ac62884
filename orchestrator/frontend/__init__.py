"""A frontend process: vLLM's OpenAI server over the router. vLLM is imported here, and nowhere else in this package."""
