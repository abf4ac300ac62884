"""`python -m workers.vllm_engine.kv_probe`: NIXL WRITEs from one process to another. Prints one line of JSON.

By itself it starts both processes on this host. Between two hosts run it with `--listen ADDRESS` on the one that
receives, and with `--to HOST:PORT` on the other. It is a program of its own, since UCX reports the transports that it
chose only in its log, whose level must be set before UCX is loaded.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib.metadata
import json
import os
import re
import socket
import sys
import tempfile
import time
from typing import Any

from orchestrator.process.command_line import CommandLine
from workers.vllm_engine.interfaces import interfaces_here, ucx_settings

_BYTES, _SMALL_BYTES, _SMALL_WRITES = 16 << 20, 8, 100
_DEADLINE_S = 60.0
_LISTEN_S = 600.0  # for the other host's command
# A row of UCX's table of protocols: | range | description | transport/device |
_TRANSPORT = re.compile(r"\|\s+([a-z][a-z0-9_]*/[\w.:-]+)\s+\|\s*$", re.M)


def transports(log: str) -> list[str]:
    """The transports in UCX's log, such as `rc_mlx5/mlx5_0:1` or `tcp/eth0`."""
    return sorted(set(_TRANSPORT.findall(log)))


def carriers(log: str) -> list[str]:
    """Of these the ones that carry the longest WRITEs to another process: its table of "remote memory write"."""
    found, elsewhere, writes = set(), False, False
    for line in log.splitlines():
        if " cfg#" in line:
            elsewhere, writes = " self cfg#" not in line, False
        elif "remote memory write" in line:
            writes = True
        elif elsewhere and writes and "..inf" in line:
            found.update(_TRANSPORT.findall(line))
    return sorted(found)


def _memory(agent: Any) -> tuple[bytearray, int]:
    """Registered memory of _BYTES, and its address."""
    memory = bytearray(os.urandom(_BYTES))
    address = ctypes.addressof((ctypes.c_char * _BYTES).from_buffer(memory))
    agent.register_memory([(address, _BYTES, 0, "")], "DRAM")
    return memory, address


def receive(sender: socket.socket) -> None:
    """The other end of `probe`: offers memory, and tells the digest of what is in it once it is asked to."""
    from nixl._api import nixl_agent, nixl_agent_config

    agent = nixl_agent(f"receiver-{os.getpid()}", nixl_agent_config(backends=["UCX"]))
    memory, address = _memory(agent)
    with sender.makefile("rw") as stream:
        print(json.dumps([agent.get_agent_metadata().hex(), address]), file=stream, flush=True)
        stream.readline()
        print(hashlib.sha256(memory).hexdigest(), file=stream, flush=True)


def probe(receiver: socket.socket) -> dict[str, Any]:
    """NIXL's version and backends, the rate of a WRITE of _BYTES, and the time of one of _SMALL_BYTES. Raises NIXL's
    exceptions, TimeoutError, and ValueError for a receiver that has died."""
    from nixl._api import nixl_agent, nixl_agent_config

    agent = nixl_agent(f"sender-{os.getpid()}", nixl_agent_config(backends=["UCX"]))
    memory, source = _memory(agent)
    with receiver.makefile("rw") as stream:
        metadata, target = json.loads(stream.readline())
        peer = agent.add_remote_agent(bytes.fromhex(metadata))

        def write(size: int, times: int) -> float:
            """Seconds of the last one."""
            ends = [agent.get_xfer_descs([(address, size, 0)], "DRAM") for address in (source, target)]
            handle = agent.initialize_xfer("WRITE", *ends, peer)
            for _ in range(times):
                began = time.perf_counter()
                state = agent.transfer(handle)
                while state == "PROC":
                    if time.perf_counter() - began > _DEADLINE_S:
                        raise TimeoutError(f"the WRITE has not ended after {_DEADLINE_S:g} s")
                    state = agent.check_xfer_state(handle)
                took_s = time.perf_counter() - began
            if state != "DONE":
                raise ValueError(f"the WRITE ended as {state}")
            return took_s

        large_s, small_s = write(_BYTES, 3), write(_SMALL_BYTES, _SMALL_WRITES)  # the first one connects
        print(file=stream, flush=True)
        intact = stream.readline().strip() == hashlib.sha256(memory).hexdigest()
    return {
        "version": importlib.metadata.version("nixl"),
        "backends": agent.get_plugin_list(),
        "bytes": _BYTES,
        "gb_per_s": _BYTES / large_s / 1e9,
        "latency_us": small_s * 1e6,
        "intact": intact,
    }


def _both_here() -> socket.socket:
    """Start the receiver; its end of the connection."""
    here, there = socket.socketpair()
    if os.fork() == 0:
        with contextlib.suppress(OSError):  # the sender has failed, and says so
            here.close()
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what UCX says here is not the answer
            receive(there)
        os._exit(0)
    there.close()
    return here


def _logged(receiver: socket.socket) -> dict[str, Any]:
    """`probe`, with the transports that UCX writes to its log."""
    with tempfile.TemporaryFile() as log:
        kept = os.dup(1)
        os.dup2(log.fileno(), 1)  # UCX and NIXL write to the descriptor itself
        try:
            told = probe(receiver)
        finally:
            with contextlib.suppress(OSError):
                sys.stdout.flush()
            os.dup2(kept, 1)
        log.seek(0)
        text = log.read().decode(errors="replace")
    return told | {"transports": transports(text), "carriers": carriers(text)}


def main() -> None:
    command = CommandLine(prog="workers.vllm_engine.kv_probe", description=__doc__)
    command.add_argument("--address", default="", help="use the network interface with this address, as a worker does")
    ends = command.add_mutually_exclusive_group()
    ends.add_argument("--listen", metavar="ADDRESS", help="receive what another host's --to writes, once")
    ends.add_argument("--to", metavar="HOST:PORT", help="write to the process that listens there")
    options = command.parse_args()
    settings = ucx_settings([options.listen or options.address], interfaces_here())
    os.environ |= {name: value for name, value in settings.items() if name not in os.environ}
    if options.listen:
        with socket.create_server((options.listen, 0)) as server:
            print(f"--to {options.listen}:{server.getsockname()[1]}", flush=True)
            server.settimeout(_LISTEN_S)
            sender = server.accept()[0]
        sender.settimeout(None)
        receive(sender)
    else:
        os.environ |= {"UCX_LOG_LEVEL": "info", "UCX_PROTO_INFO": "y"}
        if options.to:
            host, _, port = options.to.rpartition(":")
            receiver = socket.create_connection((host.strip("[]"), int(port)), _DEADLINE_S)
        else:
            receiver = _both_here()
        receiver.settimeout(_DEADLINE_S)
        print(json.dumps(_logged(receiver)))
        sys.stdout.flush()
    os._exit(0)  # agents that are destroyed at exit may wait for each other


if __name__ == "__main__":
    main()
