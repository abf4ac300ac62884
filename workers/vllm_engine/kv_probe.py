"""`python -m workers.vllm_engine.kv_probe`: a NIXL WRITE between two agents on this host. Prints one line of JSON.

It is a program of its own, since UCX reports the transports that it chose only in its log, whose level must be set
before UCX is loaded.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import json
import os
import re
import sys
import tempfile
import time
from typing import Any

from orchestrator.process.command_line import CommandLine

_BYTES = 16 << 20
_DEADLINE_S = 60.0
# A row of UCX's table of protocols: | range | description | transport/device |
_TRANSPORT = re.compile(r"\|\s+([a-z][a-z0-9_]*/[\w.:-]+)\s+\|\s*$", re.M)


def transports(log: str) -> list[str]:
    """The transports in UCX's log, such as `rc_mlx5/mlx5_0:1` or `tcp/eth0`."""
    return sorted(set(_TRANSPORT.findall(log)))


def probe() -> dict[str, Any]:
    """NIXL's version and backends, and the rate of a WRITE of _BYTES. Raises NIXL's exceptions, and TimeoutError."""
    from nixl._api import nixl_agent, nixl_agent_config

    sender, receiver = (nixl_agent(name, nixl_agent_config(backends=["UCX"])) for name in ("sender", "receiver"))
    source, target = bytearray(os.urandom(_BYTES)), bytearray(_BYTES)
    addresses = [ctypes.addressof((ctypes.c_char * _BYTES).from_buffer(memory)) for memory in (source, target)]
    regions = [(address, _BYTES, 0) for address in addresses]
    for agent, region in ((sender, regions[0]), (receiver, regions[1])):
        agent.register_memory([(*region, "")], "DRAM")
    peer = sender.add_remote_agent(receiver.get_agent_metadata())
    ends = [agent.get_xfer_descs([region], "DRAM") for agent, region in ((sender, regions[0]), (receiver, regions[1]))]
    handle = sender.initialize_xfer("WRITE", ends[0], ends[1], peer)
    for _ in range(2):  # the first one connects
        began = time.perf_counter()
        state = sender.transfer(handle)
        while state == "PROC":
            if time.perf_counter() - began > _DEADLINE_S:
                raise TimeoutError(f"the WRITE has not ended after {_DEADLINE_S:g} s")
            state = sender.check_xfer_state(handle)
        took_s = time.perf_counter() - began
    return {
        "version": importlib.metadata.version("nixl"),
        "backends": sender.get_plugin_list(),
        "bytes": _BYTES,
        "gb_per_s": _BYTES / took_s / 1e9,
        "intact": state == "DONE" and source == target,
    }


def main() -> None:
    CommandLine(prog="workers.vllm_engine.kv_probe", description=__doc__).parse_args()
    os.environ |= {"UCX_LOG_LEVEL": "info", "UCX_PROTO_INFO": "y"}
    with tempfile.TemporaryFile() as log:
        kept = os.dup(1)
        os.dup2(log.fileno(), 1)  # UCX and NIXL write to the descriptor itself
        try:
            told = probe()
        finally:
            with contextlib.suppress(OSError):
                sys.stdout.flush()
            os.dup2(kept, 1)
        log.seek(0)
        told["transports"] = transports(log.read().decode(errors="replace"))
    print(json.dumps(told))
    sys.stdout.flush()
    os._exit(0)  # agents that are destroyed at exit may wait for each other


if __name__ == "__main__":
    main()
