"""What this project uses of vLLM and NIXL, and how another version of them differs: for whoever upgrades vLLM
(`docs/upgrading-vllm.md`). No part of the product."""
