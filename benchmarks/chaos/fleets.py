"""The fleets under faults, and their undisturbed answers.

Tokens of simulated engines depend on prompt and position only, and their times are of the order of a small GPU's. Real
engines run a tiny model in float32, so that rounding explains no difference.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
from support_client import FleetClient, FleetFailed
from support_fleet import ROOT, RunningFleet, small_model, token_prompt

from benchmarks.chaos.load import Questions
from benchmarks.chaos.network import Network
from benchmarks.chaos.worker_faults import POISON
from benchmarks.chaos.world import World
from benchmarks.peers.environments import PeerError
from benchmarks.peers.processes import running
from orchestrator.config.model import resolve_model
from orchestrator.config.settings import load_config
from orchestrator.config.simulated import CRASH_TOKEN
from orchestrator.launch.host.redis_server import server_binary

COMMON = (
    "routing.remote_prefill_min_tokens=100",
    "ratio.mode=off",  # so that there are workers of each role to be hit
    "launcher.restart_backoff_max_s=1",  # there are many faults in a row, and each restart must be quick
)
# Slow enough for every phase to last: a prefill 0.2 s, a push 0.2 s, an answer 0.7 s.
SIMULATED = (
    *COMMON,
    f"workers.env.{CRASH_TOKEN}='{POISON}'",
    "sim.step_base_ms=5",
    "workers.engine_args.max_num_batched_tokens=512",  # a prompt takes several steps, so that reports show it
    "workers.engine_args.enable_prefix_caching=false",  # so that prompts sent again are prefilled remotely again
    "sim.prefill_us_per_token=100",
    "sim.link_gb_per_s=1",
)
REAL = (
    *COMMON,
    "workers.engine_args.dtype=float32",
    "workers.engine_args.block_size=32",
    "workers.engine_args.kv_cache_memory_bytes=402653184",
    "workers.engine_args.max_num_batched_tokens=256",  # as above: several steps, and the same work if sent again
    "workers.engine_args.enable_prefix_caching=false",
)
START_TIMEOUT_S = 120.0
ENGINES_START_S = 600.0  # four engines load on two cores that others may use too
SMALL_DISK = "size=24m"
REDIS_PORT, HTTP_PORT = 6379, 8000
OPERATOR_KEY = "operator"


@dataclass(frozen=True)
class Kind:
    """`sets`: added to the engine's settings. `terminal`: see RunningFleet. `disk`: whether the run folder is on a file
    system of its own. `network`: whether each process has a network namespace."""

    sets: tuple[str, ...] = ()
    terminal: bool = False
    disk: bool = False
    network: bool = False
    frontends: int = 1


FLEETS: dict[str, Kind] = {
    "plain": Kind(),
    "frontends": Kind(("frontend.replicas=2",), frontends=2),
    "three decode": Kind(("workers.decode.replicas=3",)),
    "ranks": Kind(("workers.decode.engine_args.tensor_parallel_size=2", "workers.decode.replicas=1")),
    "terminal": Kind(terminal=True),
    "disk": Kind(disk=True),
    "network": Kind(network=True),
}


@contextlib.contextmanager
def world(name: str, real: bool, seed: int) -> Iterator[World]:
    """A fleet of this kind. Raises OSError, subprocess.CalledProcessError if this machine does not allow it, and
    FleetFailed if it does not start."""
    kind = FLEETS[name]
    with contextlib.ExitStack() as stack:
        stack.enter_context(_runtime_folder(kind.disk))
        if kind.network:
            network = stack.enter_context(_network_fleet())
            fleet: NetworkFleet | RunningFleet = network
            redis_url, start = network.redis_url, None
        else:
            config, sets = _configuration(real, stack)
            start = partial(_start, config, (*sets, *kind.sets), kind.terminal)
            fleet = running = start("")
            redis_url = running.redis_url()
        made = World(fleet, redis_url, _questions(fleet, real), seed, start)
        made.frontends = kind.frontends
        try:
            yield made
        finally:
            made.close()


def _configuration(real: bool, stack: contextlib.ExitStack) -> tuple[str, tuple[str, ...]]:
    if not real:
        return "sim-2p2d.yaml", SIMULATED
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pd-model-")))
    model = small_model(folder / "small")
    return "demo-1p1d-cpu.yaml", (*REAL, f"model={model}", "workers.prefill.replicas=2", "workers.decode.replicas=2")


def _start(config: str, sets: tuple[str, ...], terminal: bool, namespace: str) -> RunningFleet:
    return RunningFleet(config, *sets, namespace=namespace, terminal=terminal, start_timeout_s=ENGINES_START_S)


def _questions(fleet: FleetClient, real: bool) -> Questions:
    """Prompts and their undisturbed answers. Raises AssertionError if such an answer is an error."""
    if real:
        prompts, max_tokens = [token_prompt(20 + 173 * i % 600, seed=i) for i in range(12)], 40
    else:
        prompts, max_tokens = [token_prompt(20 + 173 * i % 1800, seed=i) for i in range(24)], 120
    calm = asyncio.run(fleet.ask_all(prompts, concurrency=4, max_tokens=max_tokens))
    assert all(answer.ok for answer in calm), [answer.error for answer in calm if not answer.ok]
    return Questions(prompts, [answer.tokens for answer in calm])


@contextlib.contextmanager
def _runtime_folder(disk: bool) -> Iterator[None]:
    """Use another runtime folder than other fleets of this user. `disk`: on a small file system of its own."""
    folder = tempfile.mkdtemp(prefix="pdc-")
    before = os.environ.get("XDG_RUNTIME_DIR")
    try:
        if disk:
            subprocess.run(["mount", "-t", "tmpfs", "-o", SMALL_DISK, "tmpfs", folder], check=True, capture_output=True)
        os.environ["XDG_RUNTIME_DIR"] = folder
        yield
    finally:
        if before is None:
            os.environ.pop("XDG_RUNTIME_DIR", None)
        else:
            os.environ["XDG_RUNTIME_DIR"] = before
        if disk:
            subprocess.run(["umount", "-l", folder], capture_output=True)
        shutil.rmtree(folder, ignore_errors=True)


class NetworkFleet(FleetClient):
    """2P2D with each process in a network namespace, and without a launcher: no process is restarted."""

    def __init__(self, network: Network, url: str, namespace: str, redis_url: str, logs: Path) -> None:
        super().__init__(url, namespace, OPERATOR_KEY)
        self.network, self.redis_url, self._logs = network, redis_url, logs

    def machines_of(self, kind: str) -> list[str]:
        return [name for name in MACHINES if name.startswith(kind)]

    def log_tail(self) -> str:
        texts = (log.read_text(errors="replace") for log in sorted(self._logs.glob("*.log")))
        return "\n".join(line for text in texts for line in text.splitlines()[-10:])


MACHINES = ("redis", "frontend", "prefill-0", "prefill-1", "decode-0", "decode-1")


@contextlib.contextmanager
def _network_fleet() -> Iterator[NetworkFleet]:
    with contextlib.ExitStack() as stack:
        network = Network(MACHINES)
        stack.callback(network.close)
        folder = Path(os.environ["XDG_RUNTIME_DIR"])
        processes = stack.enter_context(running(folder / "logs"))
        stack.callback(processes.kill)  # nobody asks it any more, and its workers would drain

        def start(name: str, *command: str) -> None:
            processes.start(name, [*network.command(name), *command], {"PYTHONPATH": str(ROOT)})

        namespace, redis_url = f"links-{uuid.uuid4().hex[:8]}", f"redis://{network.address('redis')}:{REDIS_PORT}"
        model = resolve_model("demo")
        sets = [f"model={model}", f"namespace={namespace}", f"frontend.host={network.address('frontend')}"]
        sets += [f"security.operator_key={OPERATOR_KEY}"]  # its fleet pages need a key: it is not on loopback
        config = folder / "config.yaml"
        loaded = load_config(ROOT / "configs" / "sim-2p2d.yaml", [*sets, *SIMULATED])
        config.write_text(msgspec.json.encode(loaded).decode())
        redis = [server_binary(), "--bind", network.address("redis"), "--port", str(REDIS_PORT)]
        start("redis", *redis, "--protected-mode", "no", "--save", "")
        common = ["--redis", redis_url, "--config", str(config)]
        for name in MACHINES[2:]:
            role = name.partition("-")[0]
            where = ("--id", name, "--bind", network.address(name))
            start(name, sys.executable, "-m", "workers.main", role, *where, *common)
        start("frontend", sys.executable, "-m", "orchestrator.frontend.server", "--port", str(HTTP_PORT), *common)
        url = f"http://{network.address('frontend')}:{HTTP_PORT}"
        try:
            processes.wait(f"{url}/ready", timeout_s=START_TIMEOUT_S)
        except PeerError as error:
            raise FleetFailed(str(error)) from None
        fleet = NetworkFleet(network, url, namespace, redis_url, processes.logs)
        fleet.until(lambda: fleet.shape() == (2, 2), "two workers of each role")
        yield fleet
