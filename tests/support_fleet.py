"""A fleet started as a user starts it, its launcher's output, and that nothing of it is left at the end."""

import contextlib
import functools
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import psutil
from support_client import SETTLE_TIMEOUT_S, FleetClient, FleetFailed
from support_forked import ForkedLauncher, run_forked
from support_vllm import tiny_model

from orchestrator.config.model import resolve_model
from orchestrator.launch.host.run_folder import RunFolder
from orchestrator.process.parent import started_ticks
from orchestrator.process.telemetry.logs import request_in

ROOT = Path(__file__).parents[1]
DEMO_VOCABULARY = 49_152
START_TIMEOUT_S = 240  # with two other fleets on the same two cores
CHECKOUT = (sys.executable, "-m", "orchestrator.cli.main")  # `orchestrator` of this folder


class RunningFleet(FleetClient):
    def __init__(
        self,
        config: str | None,
        *sets: str,
        options: Sequence[str] = (),
        namespace: str = "",
        terminal: bool = False,
        api_key: str = "",
        program: Sequence[str] = CHECKOUT,
        folder: Path = ROOT,
        start_timeout_s: float = START_TIMEOUT_S,
        forked: bool = True,
        constants: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        """`config`: a file in configs/, or none. `options`: of `up`. `namespace`: made up by default. `terminal`: the
        launcher writes to one, else to a pipe. `program`: `orchestrator` as it is called, in `folder`. `forked`: that
        of this checkout need not import vLLM (`support_forked`, which also has `constants`); benchmarks, which pytest
        does not run, start what users start."""
        self.program, self.folder = program, folder
        self.namespace = namespace or f"test-{uuid.uuid4().hex[:8]}"
        self.log: list[str] = []
        self.reading = threading.Event()  # cleared: nobody reads what the launcher shows
        self.reading.set()
        arguments = [f"namespace={self.namespace}", "frontend.port=0", *sets]
        up = ["up", *([str(ROOT / "configs" / config)] if config is not None else []), *options]
        for item in arguments:
            up += ["--set", item]
        self.log_file = Path(tempfile.gettempdir()) / f"pd-{self.namespace}.log"
        self.process_log = RunFolder(self.namespace).log_path
        self.output, theirs = pty.openpty() if terminal else os.pipe()
        # Its own session: a test that kills the launcher's group must not end pytest.
        self.process: subprocess.Popen[bytes] | ForkedLauncher
        self._forked = forked and program == CHECKOUT and "PYTEST_VERSION" in os.environ
        if self._forked:
            self.process = ForkedLauncher(up, folder, theirs, constants=constants)
        else:
            self.process = subprocess.Popen(
                [*program, *up], cwd=folder, stdout=theirs, stderr=theirs, start_new_session=True
            )
        os.close(theirs)
        threading.Thread(target=self._read, daemon=True).start()
        try:
            ready = self.wait_for_line(r"Ready.*?(https?://\S+)", start_timeout_s)
        except BaseException:
            self.stop()
            raise
        super().__init__(ready.group(1).rstrip("/,"), self.namespace, api_key)

    def _read(self) -> None:
        rest = b""
        with contextlib.suppress(OSError):  # a terminal's way to say that it was closed
            while self.reading.wait() and (data := os.read(self.output, 65536)):
                *lines, rest = (rest + data).split(b"\n")
                self.log += [line.decode(errors="replace").rstrip("\r") for line in lines]
        os.close(self.output)

    def wait_for_line(self, pattern: str, timeout_s: float) -> re.Match[str]:
        seen = 0
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            while seen < len(self.log):
                if match := re.search(pattern, self.log[seen]):
                    return match
                seen += 1
            if self.process.poll() is not None and seen == len(self.log):
                break
            time.sleep(0.05)
        raise FleetFailed(f"no line matching {pattern!r} (exit code {self.process.poll()}):\n{self.log_tail()}")

    def log_tail(self) -> str:
        return "\n".join([f"log: {self.log_file}", *self.process_lines()[-60:], "shown:", *self.log[-60:]])

    def stop(self) -> None:
        self.reading.set()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                raise FleetFailed(f"the launcher did not end within 30 s of Ctrl-C:\n{self.log_tail()}") from None

    def process_lines(self) -> list[str]:
        """The output of the fleet's processes so far."""
        return self.process_log.read_text().splitlines() if self.process_log.exists() else []

    def end(self) -> None:
        """Stopped cleanly, and none of its processes left. The log is kept when something failed."""
        family = descendants(self.process.pid)
        self.http.close()
        try:
            self.stop()
            left = [pid for pid in family if started_ticks(pid) is not None]  # an orphan that has ended is init's
            assert not left, f"processes left behind: {left}; log: {self.log_file}"
        finally:
            # The runtime folder goes with the test session; the log of a failure stays.
            self.log_file.write_text("\n".join([*self.process_lines(), "shown:", *self.log, ""]))
            self.process_log.unlink(missing_ok=True)
        if sys.exc_info()[0] is None:
            self.log_file.unlink()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def request_lines(self) -> list[dict[str, Any]]:
        """The `pd.request` log lines so far, but for one that a frontend has only begun."""
        found = []
        for line in self.process_lines():
            if encoded := request_in(line):
                with contextlib.suppress(json.JSONDecodeError):
                    found.append(json.loads(encoded))
        return found

    def until_remote(self, tokens: int = 300) -> dict[str, Any]:
        """The log line of a prompt of that length that was prefilled remotely."""

        def ask(seed: int) -> dict[str, Any]:
            body = {"model": self.model, "prompt": token_prompt(tokens, 1000 + seed), "max_tokens": 4, "temperature": 0}
            answer: dict[str, Any] = self.http.post("/v1/completions", json=body).json()
            assert answer["usage"]["completion_tokens"] == 4, answer
            return answer

        _, line = self.asked_remotely(ask)
        assert line["prompt_tokens"] == tokens, line
        return line

    def asked_remotely(
        self, ask: Callable[[int], dict[str, Any]], attempts: int = 10
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """The answer to one of the prompts that `ask` sends by number, which was prefilled remotely, and its log line.
        While a busy machine keeps the prefill workers silent for a second the next is asked; no other reason for a
        local prefill is taken."""
        for number in range(attempts):
            answer = ask(number)
            request_id = answer["id"].partition("-")[2]
            (line,) = self.until(functools.partial(self.lines_of, request_id), "its log line")
            if line["reason"] not in ("prefill_worker_quiet", "no_prefill_worker"):
                break
            time.sleep(0.5)
        assert (line["outcome"], line["decision"]) == ("finished", "remote"), line
        return answer, line

    def lines_of(self, request_id: str) -> list[dict[str, Any]]:
        return [line for line in self.request_lines() if request_id in line["id"]]

    def curls(self) -> list[str]:
        """The requests that are shown after Ready, shortest prompt first."""
        self.wait_for_line(r"^curl .*printf", SETTLE_TIMEOUT_S)
        return [line for line in self.log if line.startswith("curl ")]

    def redis_url(self) -> str:
        """Of the server that the fleet uses. Raises FleetFailed."""
        if (url := RunFolder(self.namespace).redis_url()) is None:
            raise FleetFailed(f"namespace {self.namespace} names no Redis:\n{self.log_tail()}")
        return url

    def listening(self) -> list[tuple[tuple[str, int], psutil.Process]]:
        """Where its processes listen, each of those that share a port."""
        found = []
        for pid in descendants(self.process.pid):
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                links = process.net_connections("tcp")
                found += [(tuple(link.laddr), process) for link in links if link.status == psutil.CONN_LISTEN]
        return found

    def redis_pid(self) -> int:
        """The embedded Redis: the launcher's child whose command names the server."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        for pid in children:
            if b"valkey" in Path(f"/proc/{pid}/cmdline").read_bytes():
                return int(pid)
        raise FleetFailed(f"the launcher has no embedded Redis among its children {children}")

    def cli(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        done = self.run(*arguments, "--namespace", self.namespace)
        assert not check or done.returncode == 0, f"{arguments}: {done.stdout}{done.stderr}"
        return done

    def run(self, *arguments: str, timeout_s: float = 180) -> subprocess.CompletedProcess[str]:
        """A command of any fleet, as this one was started."""
        if self._forked:
            return run_forked(arguments, self.folder, timeout_s)
        command = [*self.program, *arguments]
        return subprocess.run(command, cwd=self.folder, text=True, capture_output=True, timeout=timeout_s)


def paste(line: str, shell: str = "bash") -> dict[str, Any]:
    """The answer to a curl line as a person pastes it into a shell; -s only hides the progress meter."""
    command = [shell, "-c", line.replace("curl ", "curl -s ", 1)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("{"), done.stdout + done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def operators_key(fleet: RunningFleet) -> str:
    """That which its launcher made."""
    return RunFolder(fleet.namespace).operator_key_path.read_text()


def with_operators_key(fleet: RunningFleet) -> RunningFleet:
    """On a Ray cluster pages are closed without it."""
    fleet.http.headers["authorization"] = f"Bearer {operators_key(fleet)}"
    return fleet


@contextlib.contextmanager
def running_fleet(config: str, *sets: str, **more: Any) -> Iterator[RunningFleet]:
    """Roles stay, unless `sets` say otherwise: a test counts on the workers that it started."""
    with RunningFleet(config, "ratio.mode=off", *sets, **more) as fleet:
        yield fleet


def descendants(pid: int) -> list[int]:
    """Process ids of all children of a process, and theirs."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    return []


def small_model(folder: Path, vocabulary: int = DEMO_VOCABULARY) -> str:
    """Random float32 weights behind the demo model's tokenizer: as real to every moving part, and quick on one core."""
    tiny_model(folder, layers=4, heads=4, kv_heads=4, vocabulary=vocabulary)
    return with_demo_tokenizer(folder)


def with_demo_tokenizer(folder: Path) -> str:
    """The folder of a model of the demo's vocabulary."""
    demo = Path(resolve_model("demo"))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(demo / name, folder / name)
    return str(folder)


def token_prompt(length: int, seed: int = 0) -> list[int]:
    """A prompt of exactly `length` ordinary tokens, different for each seed from its first token on."""
    return [1000 + (seed * 7919 + i * 104729 + (i * i) % 911) % 40000 for i in range(length)]
