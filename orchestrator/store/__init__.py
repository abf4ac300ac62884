"""What the fleet shares in Redis: the prefill queue and the registry, each with its Lua functions."""
