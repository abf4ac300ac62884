"""Two hosts as network namespaces, and NIXL agents there: `python support_two_hosts.py NAME FOLDER ADDRESS...`.

The agent `writer` WRITEs into the memory of `reader` over TCP, and each prints what came of it. With an address it has
the settings of a worker that is reached there; an empty one is none. For each address there is a process, since UCX
reads them once, forked from one that has imported NIXL.
"""

import contextlib
import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from support_namespaces import NAME, add_hosts, ip, remove_hosts

NAMES = ("writer", "reader")
TELLS = "came of it: "  # NIXL logs beside this
_BYTES, _DEADLINE_S = 1 << 20, 60.0


@contextlib.contextmanager
def two_hosts(addresses: tuple[str, str], others: tuple[str, str], route: str = "") -> Iterator[None]:
    """Hosts that reach each other at `addresses`, each with one of `others` on a network that ends there. `route`: the
    gateway of all other addresses."""
    hosts = [f"{NAME}-{name}" for name in NAMES]
    try:
        add_hosts(*hosts)
        ip(f"link add eth0 netns {hosts[0]} type veth peer name eth0 netns {hosts[1]}")
        for host, address, other in zip(hosts, addresses, others, strict=True):
            nodad = " nodad" if ":" in address else ""
            ip(f"-n {host} link add eth1 type veth peer name end")
            for device, has in (("lo", ""), ("eth0", address + nodad), ("eth1", other), ("end", "")):
                if has:
                    ip(f"-n {host} addr add {has} dev {device}")
                ip(f"-n {host} link set {device} up")
            if route:
                ip(f"-n {host} route add default via {route}")
        deadline = time.monotonic() + 10
        while any(ip(f"-n {host} -br link show up").count(" UP ") < 3 for host in hosts):  # the kernel tells it late
            assert time.monotonic() < deadline, "the links are not up"
            time.sleep(0.05)
        yield
    finally:
        remove_hosts(hosts)


def transfers(folder: Path, reached_at: Sequence[tuple[str, str]]) -> list[set[str]]:
    """What came of a WRITE, as the two agents tell, for each pair of addresses."""
    started = [
        subprocess.Popen(
            ["ip", "netns", "exec", f"{NAME}-{name}", sys.executable, __file__, name, str(folder), *addresses],
            env=os.environ | {"UCX_TLS": "tcp"},  # they have one kernel, so UCX would share memory
            cwd=Path(__file__).parents[1],
            stdout=subprocess.PIPE,
            text=True,
        )
        for name, addresses in zip(NAMES, zip(*reached_at, strict=True), strict=True)
    ]
    said = [process.communicate(timeout=120)[0].splitlines() for process in started]
    told = [[line.removeprefix(TELLS) for line in lines if line.startswith(TELLS)] for lines in said]
    return [set(both) for both in zip(*told, strict=True)]


def _take_part(name: str, folder: Path, address: str) -> str:
    from workers.vllm_engine.interfaces import interfaces_here, ucx_settings

    if address:
        os.environ |= ucx_settings([address], interfaces_here())
    from nixl._api import nixl_agent, nixl_agent_config

    agent = nixl_agent(name, nixl_agent_config(enable_prog_thread=False, num_threads=1))
    memory = bytearray(b"k" * _BYTES if name == "writer" else _BYTES)
    here = ctypes.addressof((ctypes.c_char * _BYTES).from_buffer(memory))
    agent.register_memory([(here, _BYTES, 0, "")], "DRAM")
    told = folder / f"{name}.new"
    told.write_bytes(here.to_bytes(8, "big") + agent.get_agent_metadata())
    told.rename(folder / name)
    other, deadline = folder / next(each for each in NAMES if each != name), time.monotonic() + _DEADLINE_S
    while not other.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    raw = other.read_bytes()
    try:
        peer = agent.add_remote_agent(raw[8:]).decode()
        if name == "reader":
            while not agent.get_new_notifs() and time.monotonic() < deadline:
                time.sleep(0.001)
            return "read" if memory[-1] == ord("k") else "nothing came"
        ends = [agent.get_xfer_descs([(at, _BYTES, 0)], "DRAM") for at in (here, int.from_bytes(raw[:8], "big"))]
        writing = agent.initialize_xfer("WRITE", *ends, peer, b"written")
        state = agent.transfer(writing)
        while state == "PROC" and time.monotonic() < deadline:
            state = agent.check_xfer_state(writing)
        time.sleep(0.5)  # its last message is still to go out
        return "written" if state == "DONE" else f"ended as {state}"
    except Exception as error:
        return type(error).__name__


def _main(name: str, folder: str, *addresses: str) -> None:
    sys.path.insert(0, str(Path(__file__).parents[1]))
    import nixl._api  # noqa: F401

    import workers.vllm_engine.interfaces  # noqa: F401

    for number, address in enumerate(addresses):
        (here := Path(folder) / str(number)).mkdir(exist_ok=True)
        if (forked := os.fork()) == 0:
            print(TELLS + _take_part(name, here, address), flush=True)
            os._exit(0)
        os.waitpid(forked, 0)


if __name__ == "__main__":
    _main(*sys.argv[1:])
