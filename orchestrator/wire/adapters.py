"""How frontends and workers name a LoRA adapter.

Engines know adapters by number, and take a number that they have loaded for the same adapter again, whatever its name
and path. So the number follows from name, path and content: all frontends give the same one, and one that an engine
still has loaded never comes back with other weights.
"""

from __future__ import annotations

from xxhash import xxh3_64_intdigest

# vLLM keeps numbers in 32 bits, signed (v1/worker/gpu/lora_utils.py, 0.32.0), and uses small ones while it warms up.
_LEAST, _MOST = 1 << 16, (1 << 31) - 1


def adapter_number(name: str, path: str, fingerprint: str) -> int:
    """`fingerprint`: of the adapter's files, as workers compute it."""
    parts = [part.encode(errors="surrogatepass") for part in (name, path, fingerprint)]
    digest = xxh3_64_intdigest(b"".join(len(part).to_bytes(4, "little") + part for part in parts))
    return _LEAST + digest % (_MOST - _LEAST)


def unique_name(name: str, number: int) -> str:
    """What engines call it, and what prefix caches tell it by: an adapter that was loaded anew has another one."""
    return f"{name}@{number}"
