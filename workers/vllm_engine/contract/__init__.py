"""What this project uses of vLLM and NIXL, and how another version of them differs. No part of a running worker."""
