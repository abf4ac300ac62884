"""What passes between vLLM's server and the router: requests are read and encoded, outputs decoded and detokenized."""
