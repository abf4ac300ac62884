"""A Ray actor on a node of the cluster that starts and watches one process of the fleet.

It outlives the launcher, so that the fleet goes on serving; the next launcher finds it by its name. What they tell each
other is MessagePack, so that none is a pickle.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections import deque
from typing import Union

import msgspec
import ray

from orchestrator.config.model import find_model
from orchestrator.config.server_args import check_server_args
from orchestrator.config.settings import Config, ConfigError
from orchestrator.launch.commands import Setup, frontend_spec, resolve, worker_spec
from orchestrator.launch.host.leftovers import SharedMemory
from orchestrator.launch.host.machine import Share
from orchestrator.launch.host.process import CannotRun, LocalProcess, adopt_orphans
from orchestrator.launch.host.run_folder import base_folder
from orchestrator.process.files import make_folder, write_text
from orchestrator.types import Role

_KEPT_LINES = 1000  # of output that no launcher has fetched
_LOOK_EVERY_S = 5.0  # for shared memory that the process uses


class Order(msgspec.Struct, frozen=True):
    """To a runner: run this on your node."""

    config: Config  # with the model's name: its path depends on the node
    name: str
    generation: int
    role: Role | None = None  # of a worker; None for a frontend
    ranks: tuple[str, ...] = ()  # the workers of its unit; none for a worker that is alone
    index: int = 0  # of a frontend


class Started(msgspec.Struct, tag="started", frozen=True):
    """From a runner: the process runs, by this order or by an earlier one."""

    pid: int
    identity: str  # see orchestrator.process.parent


class NotStarted(msgspec.Struct, tag="not_started", frozen=True):
    """From a runner: it could not be started. `never`: its node cannot run this program."""

    reason: str
    never: bool = False


class Ended(msgspec.Struct, tag="ended", frozen=True):
    """From a runner: how the process ended."""

    code: int  # negative for a signal
    reason: str | None = None  # what the process said
    final: bool = False
    lost: bool = False  # see Process


Reply = Union[Started, NotStarted, Ended]

encode = msgspec.msgpack.Encoder().encode
decode_order = msgspec.msgpack.Decoder(Order).decode
decode_reply = msgspec.msgpack.Decoder(Reply).decode


class Runner:
    """An asyncio actor. `start` is called once; then the current launcher calls `wait` and `lines`."""

    def __init__(self) -> None:
        self._process: LocalProcess | None = None
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._changed = asyncio.Event()
        self._ended: asyncio.Task[bytes] | None = None
        self._starting = asyncio.Lock()
        self._role = ""

    async def start(self, order: bytes) -> bytes:
        """Start the process, unless it was started before. Returns Started or NotStarted."""
        async with self._starting:
            if self._process is None:
                try:
                    self._process = await self._started(decode_order(order))
                except (ConfigError, OSError, msgspec.ValidationError) as error:
                    return encode(NotStarted(" ".join(str(error).split()), never=isinstance(error, CannotRun)))
                self._ended = asyncio.create_task(self._run(self._process))
        return encode(Started(self._process.pid, self._process.identity))

    async def role(self) -> str:
        """The role of the worker that it was started for; empty for a frontend, and before it was started."""
        return self._role

    async def wait(self) -> bytes:
        """Wait until the process and its process group have ended. Returns Ended."""
        assert self._ended is not None, "start it first"
        return await asyncio.shield(self._ended)

    async def lines(self, timeout_s: float) -> list[str]:
        """New lines of its output, or none after `timeout_s`. Each line is returned once."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not self._lines:
                    self._changed.clear()
                    await self._changed.wait()
        lines = list(self._lines)
        self._lines.clear()
        return lines

    async def stop(self, timeout_s: float) -> None:
        if self._process is not None:
            await self._process.stop(timeout_s)

    async def kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    async def _started(self, order: Order) -> LocalProcess:
        self._role = order.role.value if order.role is not None else ""  # at once: to fetch a model takes minutes
        adopt_orphans()
        host = ray.util.get_node_ip_address()
        folder = base_folder() / f"{order.config.namespace}@{host}"  # its files have passwords and keys
        config = await asyncio.to_thread(self._on_this_node, order.config, host)
        if order.role is None:
            check_server_args(config)  # by this node's environment and files
        make_folder(base_folder())
        make_folder(folder)
        file = folder / f"{order.name}.yaml"
        write_text(file, msgspec.json.encode(config).decode())
        self._file, setup = file, Setup(order.generation, config, file)
        try:
            if order.role is not None:
                spec = worker_spec(setup, order.role, order.name, Share(), order.ranks)
            else:
                spec = frontend_spec(setup, order.name, order.index)
            process = LocalProcess(spec, self._hear)
            await process.start()
        except OSError:
            self._remove_file()
            raise
        return process

    def _on_this_node(self, config: Config, host: str) -> Config:
        """The configuration with this node's address and its path of the model. Raises ConfigError."""
        model = find_model(config.model, lambda stage: self._hear("", f"model: {stage}"))
        replace = msgspec.structs.replace
        config = resolve(config, model, config.redis.url, config.frontend.port)
        return replace(
            config,
            workers=replace(config.workers, bind=host, advertise=None),
            frontend=replace(config.frontend, host=_listen_at(config.frontend.host, host)),
        )

    async def _run(self, process: LocalProcess) -> bytes:
        """Wait until the process has ended, and remove what it left. Returns Ended."""
        shared = SharedMemory()
        ended = asyncio.create_task(process.wait())
        while not ended.done():
            await asyncio.to_thread(shared.scan, {process.pid})
            await asyncio.wait({ended}, timeout=_LOOK_EVERY_S)
        await asyncio.to_thread(shared.remove_files_of, process.pid)
        said = process.exit_reason
        self._remove_file()
        return encode(Ended(ended.result(), said.text if said else None, bool(said and said.final), process.lost))

    def _remove_file(self) -> None:
        self._file.unlink(missing_ok=True)
        folder = self._file.parent
        with contextlib.suppress(OSError):
            if not any(path.is_file() for path in folder.iterdir()):  # nobody else's: the counters of all are left
                shutil.rmtree(folder)

    def _hear(self, _: str, line: str) -> None:
        self._lines.append(line)
        self._changed.set()


def _listen_at(asked: str, host: str) -> str:
    """The node's own address replaces a loopback one, which is the default and cannot be reached from elsewhere."""
    return host if asked in ("127.0.0.1", "localhost", "::1") else asked
