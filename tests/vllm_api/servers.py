"""The servers that the tests ask for: plain ones of vLLM, or fleets that prefill every prompt that they can remotely.

Both run on CPU in float32. One runs at a time, and modules that ask for the same one after the other share it.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import httpx
import yaml
from support_servers import free_port
from vllm.engine.arg_utils import AsyncEngineArgs

from orchestrator.config.engine_args import to_command_line
from vllm_api import hub

_PR_SET_PDEATHSIG = 1  # prctl(2)
_START_TIMEOUT_S = 400.0
_STOP_TIMEOUT_S = 40.0
# Both kinds of server get our own sizes: those that tests ask for are a GPU's.
_SIZES = ("dtype", "enforce_eager", "gpu_memory_utilization", "max_num_seqs", "max_cpu_loras", "seed", "port")
_OURS = {
    "dtype": "float32",
    "enforce_eager": True,
    "kv_cache_memory_bytes": 512 << 20,
    "max_num_seqs": 32,
    "seed": 0,
    # Without a limit of its own an answer of random weights is as long as the model allows.
    "override_generation_config": {"max_new_tokens": 400},
}
_MAX_MODEL_LEN = 8192
# What adds to a server without changing what others get of it: one server has all of it, under all names.
_ADDING = {
    "enable_lora": True,
    "max_lora_rank": 256,
    "lora_modules": [
        f"{name}={hub.adapter(repository)}"
        for name, repository in (
            ("zephyr-lora", "typeof/zephyr-7b-beta-lora"),
            ("qwen3-lora", "charent/self_cognition_Alice"),
        )
    ],
    "enable_auto_tool_choice": True,
    "tool_call_parser": "hermes",
    "enable_server_load_tracking": True,
    "enable_tokenizer_info_endpoint": True,
    "max_model_len": _MAX_MODEL_LEN,
    "served_model_name": [*hub.NAMES, "claude-3-7-sonnet-latest"],
}
_ADDING_TOO = ("enable_chunked_prefill", "max_num_batched_tokens", "structured_outputs_config")
_LONG_ANSWERS = 10_100  # the max_model_len of a test that asks for endless answers, and leaves
_SHORTEST = 1024  # a shorter max_model_len is what a test is about
_TEXTS = ("show_hidden_metrics_for_version",)  # options whose value looks like a number and is none
_MANY = ("lora_modules", "middleware", "served_model_name")  # options that take several values


@dataclasses.dataclass(frozen=True)
class Wanted:
    """What a test module asks for; equal ones share a server."""

    model: str
    arguments: str  # JSON
    environment: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, model: str, arguments: Iterable[str], environment: dict[str, str] | None, alone: bool) -> Wanted:
        """`alone`: the very server that is asked for, where its list of models or its counters are looked at."""
        named = {name: value for name, value in parse(arguments).items() if name not in _SIZES}
        # Tests hand over a copy of their whole environment; what they added matters.
        added = {k: v for k, v in (environment or {}).items() if os.environ.get(k) != v}
        length = named.get("max_model_len", _SHORTEST)
        if not alone and not added and _SHORTEST <= length <= _MAX_MODEL_LEN:
            if named.keys() <= {*_ADDING, *_ADDING_TOO}:
                model, named = hub.NAMES[0], _ADDING
        return cls(model, json.dumps(named, sort_keys=True), tuple(sorted(added.items())))

    def options(self) -> dict[str, Any]:
        options = {**_OURS, **json.loads(self.arguments)}
        if options.get("max_model_len") == _LONG_ANSWERS:
            del options["override_generation_config"]
        return options


def parse(arguments: Iterable[str]) -> dict[str, Any]:
    """`--max-model-len 128 --enable-lora` as {"max_model_len": 128, "enable_lora": True}; the last of a name counts."""
    found: dict[str, Any] = {}
    name = ""
    for item in arguments:
        if item.startswith("--"):
            name, _, value = item[2:].partition("=")
            name = name.replace("-", "_")
            found[name] = [] if not value else [value]
        else:
            found[name].append(item)
    named: dict[str, Any] = {}
    for name, values in found.items():
        if name in _MANY:
            named[name] = values
        elif name.startswith("no_") and not values:
            named[name.removeprefix("no_")] = False
        elif "." in name:
            section, key = name.split(".", 1)
            named.setdefault(section, {})[key] = _value(values[0])
        elif name in _TEXTS:
            named[name] = values[0]
        else:
            named[name] = _value(values[0]) if values else True
    return named


def _value(text: str) -> Any:
    with contextlib.suppress(ValueError):
        return json.loads(text)
    return text


class Server:
    """One running server. Raises RuntimeError, with the end of its log, when it does not start."""

    def __init__(self, kind: str, wanted: Wanted) -> None:
        self.kind, self.wanted = kind, wanted
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._folder = tempfile.TemporaryDirectory(prefix="vllm-api-")
        self._log = Path(self._folder.name) / "server.log"
        self._start()

    def alive(self) -> bool:
        return self._process.poll() is None

    def revive(self) -> None:
        """Start again at the same address if it has ended: a test may crash its server, and others come after it."""
        if not self.alive():
            self._start()

    def placements(self) -> dict[str, float]:
        """A fleet's placements by decision so far."""
        with contextlib.suppress(httpx.HTTPError):
            text = httpx.get(f"{self.url}/metrics", timeout=10).text
            found = re.findall(r'^pd_placements_total\{.*decision="(\w+)".*\} (\S+)$', text, re.MULTILINE)
            return {decision: float(count) for decision, count in found}
        return {}

    def stop(self) -> None:
        if self.alive():
            self._process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOP_TIMEOUT_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._folder.cleanup()

    def _start(self) -> None:
        command = self._plain() if self.kind == "plain" else self._fleet()
        environment = {**os.environ, **dict(self.wanted.environment), "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}
        with self._log.open("w") as log:
            # Its own session: what is left of it can be ended together.
            self._process = subprocess.Popen(
                command,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not self._ready():
            if not self.alive() or time.monotonic() > deadline:
                end = self._log.read_text()[-4000:]
                self.stop()
                raise RuntimeError(f"the {self.kind} server for {self.wanted} did not start:\n{end}")
            time.sleep(0.2)

    def _ready(self) -> bool:
        if self.kind == "fleet" and "Ready" not in self._log.read_text():
            return False
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"{self.url}/health", timeout=5).status_code == 200
        return False

    def _plain(self) -> list[str]:
        options = {"model": self.wanted.model, "host": "127.0.0.1", "port": self.port, **self.wanted.options()}
        return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *to_command_line(options, spread=_MANY)]

    def _fleet(self) -> list[str]:
        options = self.wanted.options()
        engine = {name: value for name, value in options.items() if name in _engine_fields()}
        engine.pop("served_model_name", None)  # a frontend's
        config = {
            "model": self.wanted.model,
            "namespace": f"vllm-api-{self.port}",
            "frontend": {"port": self.port, "server_args": {k: v for k, v in options.items() if k not in engine}},
            "workers": {"engine_args": engine},
            # Every prompt: of those asked again, the last token is cached nowhere.
            "routing": {"remote_prefill_min_tokens": 1},
        }
        file = Path(self._folder.name) / "fleet.yaml"
        file.write_text(yaml.safe_dump(config))
        return [sys.executable, "-m", "orchestrator.cli.main", "up", str(file)]


@functools.cache
def _engine_fields() -> frozenset[str]:
    return frozenset(field.name for field in dataclasses.fields(AsyncEngineArgs))


def _end_with_parent() -> None:
    """In the child: SIGINT comes when the test session is killed."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGINT)


class Pool:
    """At most one server at a time: two cores hold no more."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._server: Server | None = None
        self.placements: dict[str, float] = {}

    def get(self, wanted: Wanted, fresh: bool = False) -> Server:
        if self._server is None or self._server.wanted != wanted or fresh:
            self.stop()
            self._server = Server(self._kind, wanted)
        return self._server

    def revive(self) -> None:
        if self._server is not None:
            self._server.revive()

    def stop(self) -> None:
        if self._server is None:
            return
        for decision, count in self._server.placements().items():
            self.placements[decision] = self.placements.get(decision, 0) + count
        self._server.stop()
        self._server = None
