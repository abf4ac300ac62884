"""The processes of one system under test: starts them, waits until they answer, measures their CPU time, ends them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import httpx
import psutil

from benchmarks.peers.environments import PeerError

STOP_TIMEOUT_S = 30.0


class Processes:
    """Each process is in a group of its own, and its output goes to a file in the folder `logs`."""

    def __init__(self, logs: Path) -> None:
        self.logs = logs
        self._started: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, command: Sequence[str], environment: Mapping[str, str] = {}) -> None:
        with (self.logs / f"{name}.log").open("wb") as log:
            self._started[name] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                start_new_session=True,
            )

    def wait(self, url: str, words: str = "", timeout_s: float = 180.0) -> None:
        """Wait until `url` answers 200 with these words. Raises PeerError with the last line of a process that ended
        before, or after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            for name, process in self._started.items():
                if process.poll() is not None:
                    raise PeerError(f"{name} ended with {process.returncode}: {self._last_words(name)}")
            with contextlib.suppress(httpx.HTTPError):
                answer = httpx.get(url, timeout=2.0)
                if answer.status_code == 200 and words in answer.text:
                    return
            time.sleep(0.2)
        last = "; ".join(f"{name}: {self._last_words(name)}" for name in self._started)
        raise PeerError(f"{url} did not answer within {timeout_s:g} s; {last}")

    def members(self, name: str | None = None, having: str = "") -> Iterator[psutil.Process]:
        """The process `name`, or all, and their children; only those with `having` in their command line."""
        for root in [self._started[name]] if name is not None else self._started.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(root.pid)
                for member in [process, *process.children(recursive=True)]:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        if having in " ".join(member.cmdline()):
                            yield member

    def cpu_s(self, name: str | None = None, having: str = "") -> float:
        """CPU seconds so far of these `members`."""
        total = 0.0
        for member in self.members(name, having):
            with contextlib.suppress(psutil.NoSuchProcess):
                times = member.cpu_times()
                total += times.user + times.system
        return total

    def stop(self) -> None:
        try:
            for process in reversed(self._started.values()):
                if process.poll() is None:
                    process.terminate()
            deadline = time.monotonic() + STOP_TIMEOUT_S
            for process in self._started.values():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.1, deadline - time.monotonic()))
        finally:  # those that did not end, and children; also if a second signal breaks off the wait
            self.kill()

    def kill(self) -> None:
        for process in self._started.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _last_words(self, name: str) -> str:
        lines = [line for line in (self.logs / f"{name}.log").read_text(errors="replace").splitlines() if line.strip()]
        return f"{lines[-1].strip()[:300]} ({self.logs / name}.log)" if lines else "it said nothing"


@contextlib.contextmanager
def running(logs: Path) -> Iterator[Processes]:
    logs.mkdir(parents=True, exist_ok=True)
    processes = Processes(logs)
    try:
        yield processes
    finally:
        processes.stop()
