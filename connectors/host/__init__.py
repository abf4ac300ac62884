"""The host tier (`kv.host_tier_bytes`): KV that an engine has computed, kept in the memory of its host."""
