"""A fleet started as a user starts it, and what a test asks of it: requests, load, faults, and that nothing leaked."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
from support_vllm import tiny_model

from orchestrator.config.model import resolve_model
from orchestrator.launch.host.run_folder import RunFolder

ROOT = Path(__file__).parents[1]
START_TIMEOUT_S = 180
SETTLE_TIMEOUT_S = 60


class FleetFailed(AssertionError):
    """`orchestrator up` ended, or was not ready in time; carries its log."""


@dataclass
class Answer:
    """One request's outcome as its client saw it."""

    status: int
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    error: str | None = None
    request_id: str = ""
    retry_after_s: int = 0
    usage: dict[str, Any] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return self.status == 200 and self.error is None


class RunningFleet:
    def __init__(self, config: str, *sets: str) -> None:
        self.namespace = f"test-{uuid.uuid4().hex[:8]}"
        self.log: list[str] = []
        arguments = [f"namespace={self.namespace}", "frontend.port=0", *sets]
        command = [sys.executable, "-m", "orchestrator.cli.main", "up", str(ROOT / "configs" / config)]
        for item in arguments:
            command += ["--set", item]
        self.log_file = Path(tempfile.gettempdir()) / f"pd-{self.namespace}.log"
        self.process_log = RunFolder(self.namespace).log_path
        # Its own session: a test that kills the launcher's group must not end pytest.
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        threading.Thread(target=self._read, daemon=True).start()
        try:
            ready = self.wait_for_line(r"Ready.*?(https?://\S+)", START_TIMEOUT_S)
        except BaseException:
            self.stop()
            raise
        self.url = ready.group(1).rstrip("/,")
        self.http = httpx.Client(base_url=self.url, timeout=120)
        self.model = self.http.get("/v1/models").json()["data"][0]["id"]

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.log.append(line.rstrip("\n"))

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
        raise FleetFailed(f"no line matching {pattern!r} (exit code {self.process.poll()}):\n{self._tail()}")

    def _tail(self) -> str:
        return "\n".join([*self.process_lines()[-60:], "shown:", *self.log[-60:]])

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                raise FleetFailed(f"the launcher did not end within 30 s of Ctrl-C:\n{self._tail()}") from None

    # ---- looking -----------------------------------------------------------------------------------------------

    def fleet(self) -> dict[str, Any]:
        return self.http.get("/fleet").json()

    def workers(self, role: str | None = None, state: str = "ready") -> list[dict[str, Any]]:
        return [w for w in self.fleet()["workers"] if w["state"] == state and role in (None, w["role"])]

    def shape(self) -> tuple[int, int]:
        """(prefill, decode) workers that are ready."""
        return len(self.workers("prefill")), len(self.workers("decode"))

    def metric(self, name: str, **labels: str) -> float:
        total = 0.0
        for line in self.http.get("/metrics").text.splitlines():
            if line.startswith((name + "{", name + " ")) and all(f'{k}="{v}"' in line for k, v in labels.items()):
                total += float(line.rsplit(" ", 1)[1])
        return total

    def process_lines(self) -> list[str]:
        """The output of the fleet's processes so far."""
        return self.process_log.read_text().splitlines() if self.process_log.exists() else []

    def request_lines(self) -> list[dict[str, Any]]:
        """The `pd.request` log lines so far."""
        found = (re.search(r" pd\.request: (\{.*\})", line) for line in self.process_lines())
        return [json.loads(match.group(1)) for match in found if match]

    def curls(self) -> list[str]:
        """The requests that are shown after Ready, shortest prompt first."""
        self.wait_for_line(r"^curl .*printf", SETTLE_TIMEOUT_S)
        return [line for line in self.log if line.startswith("curl ")]

    def redis_pid(self) -> int:
        """The embedded Redis: the launcher's child whose command names the server."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        for pid in children:
            if b"valkey" in Path(f"/proc/{pid}/cmdline").read_bytes():
                return int(pid)
        raise FleetFailed(f"the launcher has no embedded Redis among its children {children}")

    def cli(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "orchestrator.cli.main", *arguments, "--namespace", self.namespace]
        done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=60)
        assert not check or done.returncode == 0, f"{arguments}: {done.stdout}{done.stderr}"
        return done

    def until(self, condition: Callable[[], Any], what: str, timeout_s: float = SETTLE_TIMEOUT_S) -> Any:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            with contextlib.suppress(httpx.HTTPError):
                if value := condition():
                    return value
            time.sleep(0.1)
        try:
            seen: object = self.fleet()
        except httpx.HTTPError as error:
            seen = repr(error)
        raise FleetFailed(f"not within {timeout_s:g} s: {what}; fleet: {seen}; log: {self.log_file}\n{self._tail()}")

    def assert_no_leaks(self) -> None:
        """Every block of every worker free, nothing running or waiting, queue and claims empty."""

        def clean() -> bool:
            seen = self.fleet()
            idle = all(
                w["blocks_free"] == w["blocks_total"] and not w["running"] and not w["waiting"] for w in seen["workers"]
            )
            return idle and seen["queue"] == {"requests": 0, "tokens": 0, "claimed": 0}

        self.until(clean, "all blocks free, queue and claims empty")

    # ---- asking ------------------------------------------------------------------------------------------------

    async def ask(
        self, client: httpx.AsyncClient, prompt: list[int] | str, max_tokens: int = 16, **more: Any
    ) -> Answer:
        """A streamed completion; token ids are collected, errors inside the stream too."""
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "return_token_ids": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
            **more,
        }
        answer = Answer(0)
        try:
            async with client.stream("POST", "/v1/completions", json=body) as response:
                answer.status = response.status_code
                answer.request_id = response.headers.get("x-request-id", "")
                answer.retry_after_s = int(response.headers.get("retry-after", 0))
                if response.status_code != 200:
                    answer.error = (await response.aread()).decode()
                    return answer
                async for line in response.aiter_lines():
                    if not line.startswith("data: ") or line == "data: [DONE]":
                        continue
                    event = json.loads(line[6:])
                    if "error" in event:
                        answer.error = json.dumps(event["error"])
                    for choice in event.get("choices", ()):
                        answer.text += choice["text"]
                        answer.tokens += choice.get("token_ids") or []
                        answer.logprobs += (choice.get("logprobs") or {}).get("token_logprobs", [])
                    if event.get("usage"):
                        answer.usage = event["usage"]
        except httpx.HTTPError as error:
            answer.error = f"{type(error).__name__}: {error}"
        return answer

    @contextlib.asynccontextmanager
    async def client(self) -> AsyncIterator[httpx.AsyncClient]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=self.url, timeout=180, limits=limits) as client:
            yield client

    async def ask_all(self, prompts: list[Any], concurrency: int, max_tokens: int = 16, **more: Any) -> list[Answer]:
        gate = asyncio.Semaphore(concurrency)

        async with self.client() as client:

            async def one(prompt: Any) -> Answer:
                async with gate:
                    return await self.ask(client, prompt, max_tokens, **more)

            return await asyncio.gather(*(one(prompt) for prompt in prompts))

    @contextlib.asynccontextmanager
    async def under_load(self, prompts: list[Any], concurrency: int, max_tokens: int) -> AsyncIterator[list[Answer]]:
        """Streams requests, each over and over, while the body runs; yields the list of answers, filled as they end."""
        answers: list[Answer] = []
        stopping = asyncio.Event()

        async with self.client() as client:

            async def loop(offset: int) -> None:
                turn = offset
                while not stopping.is_set():
                    answers.append(await self.ask(client, prompts[turn % len(prompts)], max_tokens))
                    turn += concurrency

            tasks = [asyncio.create_task(loop(i)) for i in range(concurrency)]
            try:
                yield answers
            finally:
                stopping.set()
                await asyncio.wait_for(asyncio.gather(*tasks), 180)


def paste(line: str, shell: str = "bash") -> dict[str, Any]:
    """The answer to a curl line as a person pastes it into a shell; -s only hides the progress meter."""
    command = [shell, "-c", line.replace("curl ", "curl -s ", 1)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("{"), done.stdout + done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


@contextlib.contextmanager
def running_fleet(config: str, *sets: str) -> Iterator[RunningFleet]:
    """Ends with: the launcher stopped cleanly, none of its processes left. The log is kept when something failed."""
    fleet = RunningFleet(config, *sets)
    try:
        yield fleet
    finally:
        family = descendants(fleet.process.pid)
        fleet.http.close()
        fleet.stop()
        left = [pid for pid in family if Path(f"/proc/{pid}").exists()]
        # The runtime folder goes with the test session; the log of a failure stays.
        fleet.log_file.write_text("\n".join([*fleet.process_lines(), "shown:", *fleet.log, ""]))
        fleet.process_log.unlink(missing_ok=True)
        assert not left, f"processes left behind: {left}; log: {fleet.log_file}"
    fleet.log_file.unlink()


def descendants(pid: int) -> list[int]:
    """Process ids of all children of a process, and theirs."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    return []


def small_model(folder: Path) -> str:
    """Random float32 weights behind the demo model's tokenizer: as real to every moving part, and quick on one core."""
    tiny_model(folder, layers=4, heads=4, kv_heads=4, vocabulary=49_152)
    demo = Path(resolve_model("demo"))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(demo / name, folder / name)
    return str(folder)


def token_prompt(length: int, seed: int = 0) -> list[int]:
    """A prompt of exactly `length` ordinary tokens, different for each seed from its first token on."""
    return [1000 + (seed * 7919 + i * 104729 + (i * i) % 911) % 40000 for i in range(length)]
