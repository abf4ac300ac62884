"""Several Redis servers: nodes of a cluster, or a primary and its replica under a Sentinel."""

import asyncio
import contextlib
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from support_wait import until

from orchestrator.launch.host.redis_server import server_binary
from orchestrator.store.client import Redis, RedisAway, connect

TIMEOUT_S = 5.0
PORTS_TRIED = 5
BUS_OFFSET = 10_000  # from a cluster node's port to that of its bus
SERVICE = "fleet"  # what the Sentinel calls the pair


class Node:
    """One server process, on a port of its own."""

    def __init__(self, folder: Path, *arguments: str, config: str | None = None) -> None:
        for _ in range(PORTS_TRIED):
            self.port = free_port()
            self.address = f"127.0.0.1:{self.port}"
            self._start(folder / str(self.port), arguments, config)
            if self._listens():
                return
        raise RuntimeError(f"no server of {PORTS_TRIED} listened on its port; the last was {self.address}")

    def _start(self, own: Path, arguments: tuple[str, ...], config: str | None) -> None:
        own.mkdir()
        command = [server_binary()]
        if config is not None:
            (own / "node.conf").write_text(config)
            command.append(str(own / "node.conf"))
        command += [*arguments, "--port", str(self.port), "--dir", str(own), "--save", ""]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT, cwd=own)

    def _listens(self) -> bool:
        """False: it has ended, because another program took its port meanwhile."""
        deadline = time.monotonic() + TIMEOUT_S
        while self.process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), TIMEOUT_S):
                return self.process.poll() is None
            time.sleep(0.02)
        self.kill()
        return False

    async def client(self) -> Redis:
        async def connected() -> Redis | None:
            with contextlib.suppress(RedisAway):
                return await connect(f"redis://{self.address}", TIMEOUT_S)
            return None

        client = await until(connected, f"{self.address} answers")
        assert client is not None
        return client

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def free_port() -> int:
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        if port + BUS_OFFSET < 65536:
            return port


Start = Callable[..., Node]


@contextlib.contextmanager
def nodes(folder: Path) -> Iterator[Start]:
    """Starts nodes, with the arguments of `Node`; ends them all."""
    started: list[Node] = []

    def begin(*arguments: str, config: str | None = None) -> Node:
        started.append(Node(folder, *arguments, config=config))
        return started[-1]

    try:
        yield begin
    finally:
        for node in started:
            node.kill()


async def watched_pair(start: Start) -> tuple[Node, Node, Node]:
    """A primary, its replica, and the Sentinel that promotes the replica when the primary dies."""
    primary = start()
    replica = start("--replicaof", "127.0.0.1", str(primary.port))
    sentinel = start(
        "--sentinel",
        config=f"sentinel monitor {SERVICE} 127.0.0.1 {primary.port} 1\n"
        f"sentinel down-after-milliseconds {SERVICE} 300\nsentinel failover-timeout {SERVICE} 3000\n",
    )

    async def linked() -> bool:
        return b"slave0:" in await raw_info(sentinel) or b"slaves=1" in await raw_info(sentinel)

    await until(linked, "the Sentinel knows the replica")
    return primary, replica, sentinel


async def raw_info(node: Node) -> bytes:
    """Of a Sentinel, which refuses what a client asks of servers."""
    with contextlib.suppress(OSError):
        reader, writer = await asyncio.open_connection("127.0.0.1", node.port)
        writer.write(b"INFO sentinel\r\n")
        head = await reader.readline()
        text = await reader.readexactly(int(head[1:])) if head.startswith(b"$") else head
        writer.close()
        return text
    return b""
