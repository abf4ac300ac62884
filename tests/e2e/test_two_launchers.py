"""Two launchers that share a fleet, as on two hosts: one Redis, each with its own run folder, workers and frontend.

Real processes, simulated engines, streaming load on both frontends.
"""

import asyncio
import contextlib
import re
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import support_client
from support_fleet import ROOT, RunningFleet, descendants, token_prompt
from support_redis import fresh_namespace, running_server

from orchestrator.process.parent import identity_of
from orchestrator.process.tasks import cancelled
from orchestrator.store.client import connect
from orchestrator.store.registry import Registry
from orchestrator.types import WorkerState

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

CONFIG = str(ROOT / "configs" / "sim-2p2d.yaml")
# The fleet's, so also what is rolled out has them: roles stay, and long prompts are prefilled remotely.
FLEETS = (
    "ratio.mode=off",
    "workers.timeout_s=10",
    "routing.remote_prefill_min_tokens=100",
    support_client.LONG_STEPS,
)
PROMPTS = [token_prompt(20 + 173 * i % 1800, seed=i) for i in range(40)]
MAX_TOKENS = 40
LOOK_EVERY_S = 0.02


class Hosts:
    """The two launchers. `first` came first; both have a worker of each role."""

    def __init__(self, folder: Path, redis_url: str) -> None:
        self._folder, self._redis_url = folder, redis_url
        self.namespace = fresh_namespace()
        self.first = self.up("first")
        self.second = self.up("second")
        self.first.process.send_signal(signal.SIGSTOP)  # for a moment, so that the other one starts what is missing
        try:
            self.second.cli("scale", "prefill=2", "decode=2", "--redis", redis_url)
            self.second.until(lambda: len(self.workers_of(self.second)) == 2, "the second has claimed two workers")
        finally:
            self.first.process.send_signal(signal.SIGCONT)
        self.first.until(lambda: self.first.shape() == (2, 2), "2P2D")

    def up(self, name: str) -> RunningFleet:
        sets = ("workers.prefill.replicas=1", "workers.decode.replicas=1", *FLEETS)
        (self._folder / name).mkdir(exist_ok=True)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("XDG_RUNTIME_DIR", str(self._folder / name))
            return RunningFleet("sim-2p2d.yaml", f"redis.url={self._redis_url}", *sets, namespace=self.namespace)

    def cli(self, *arguments: str, check: bool = True) -> str:
        done = self.first.cli(*arguments, "--redis", self._redis_url, check=check)
        return done.stdout + done.stderr

    def rollout(self, change: str, check: bool = True) -> str:
        return self.cli("rollout", CONFIG, *(f"--set={item}" for item in (change, *FLEETS)), check=check)

    def workers_of(self, launcher: RunningFleet) -> dict[str, int]:
        """Of the ready workers those whose processes this launcher runs, with their pids."""
        family = descendants(launcher.process.pid)
        return {worker["id"]: worker["pid"] for worker in launcher.workers() if worker["pid"] in family}

    def new_of(self, launcher: RunningFleet, generation: int) -> list[str]:
        """The workers of this launcher that are of this generation."""
        mine = self.workers_of(launcher)
        return [w["id"] for w in launcher.workers() if w["id"] in mine and w["generation"] == generation]

    def split(self) -> list[int]:
        return [len(self.workers_of(launcher)) for launcher in (self.first, self.second)]

    @asynccontextmanager
    async def nobody_fails(self, *launchers: RunningFleet) -> AsyncIterator[None]:
        """With load on these launchers' frontends, by default on both."""
        loaded = launchers or (self.first, self.second)
        async with support_client.nobody_fails(loaded, PROMPTS, concurrency=4, max_tokens=MAX_TOKENS):
            yield

    @asynccontextmanager
    async def one_away_at_a_time(self) -> AsyncIterator[None]:
        """By the registry, at each look."""
        worst = dict.fromkeys("abcd", WorkerState.READY)

        async def look() -> None:
            nonlocal worst
            async with await connect(self._redis_url, 5) as redis:
                registry = Registry(redis, self.namespace)
                while True:
                    states = {name: worker.state for name, worker in (await registry.workers()).items()}
                    worst = min(worst, states, key=serving)
                    await asyncio.sleep(LOOK_EVERY_S)

        looking = asyncio.create_task(look())
        try:
            yield
            assert not looking.done()
        finally:
            await cancelled(looking)
        assert serving(worst) == 3, f"each is replaced, and no two at once: {worst}"

    def end(self) -> None:
        with contextlib.ExitStack() as stack:
            stack.callback(self.first.end)
            stack.callback(self.second.end)


def serving(states: dict[str, WorkerState]) -> int:
    return list(states.values()).count(WorkerState.READY)


def generations(launcher: RunningFleet) -> list[int]:
    """Of all workers of the fleet."""
    return sorted(worker["generation"] for worker in launcher.workers())


def all_new(launcher: RunningFleet, before: set[int]) -> bool:
    now = generations(launcher)
    return len(now) == 4 and not before & {*now}


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    folder = tmp_path_factory.mktemp("hosts")
    with running_server(folder / "redis") as server:
        hosts = Hosts(folder, server.url)
        try:
            yield hosts
        finally:
            hosts.end()


async def test_a_rollout_replaces_the_workers_of_both(hosts: Hosts) -> None:
    """Blocks of another size: KV that passed between generations would end in other tokens, or a crash."""
    before = hosts.workers_of(hosts.first), hosts.workers_of(hosts.second)
    assert [len(workers) for workers in before] == [2, 2]
    async with hosts.nobody_fails(), hosts.one_away_at_a_time():
        said = await asyncio.to_thread(hosts.rollout, "workers.engine_args.block_size=32")
    after = hosts.workers_of(hosts.first), hosts.workers_of(hosts.second)
    assert [workers.keys() for workers in after] == [workers.keys() for workers in before], said
    assert not {*before[0].values(), *before[1].values()} & {*after[0].values(), *after[1].values()}
    assert generations(hosts.second) == [1] * 4
    for launcher in (hosts.first, hosts.second):
        launcher.assert_no_leaks()


async def test_abort_rolls_back_both_launchers(hosts: Hosts) -> None:
    async with hosts.nobody_fails(), hosts.one_away_at_a_time():
        rolling = asyncio.create_task(
            asyncio.to_thread(hosts.rollout, "workers.engine_args.num_gpu_blocks_override=2000", check=False)
        )
        await hosts.first.soon(lambda: len(set(generations(hosts.first))) == 2, "a worker is replaced")
        shown = await asyncio.to_thread(hosts.cli, "status")
        assert re.search(r"rollout forward: configuration 1 to 2, [1-4] of [34] workers run it", shown), shown
        both = (hosts.first, hosts.second)
        await hosts.first.soon(lambda: all(hosts.new_of(each, 2) for each in both), "both have a new worker")
        aborted = await asyncio.to_thread(hosts.cli, "rollout", "--abort")
        assert "went back" in aborted, aborted
        assert "aborted" in await rolling
    assert "rollout undone: " in await asyncio.to_thread(hosts.cli, "status")
    assert generations(hosts.second) == [1] * 4 and hosts.split() == [2, 2]
    assert {worker["blocks_total"] for worker in hosts.first.workers()} == {4096}
    for launcher in (hosts.first, hosts.second):
        launcher.assert_no_leaks()


async def test_a_launcher_that_dies_leaves_the_rollout_to_the_other(hosts: Hosts) -> None:
    """The one that orders, with its workers, whose places the other one takes; then it comes back."""
    leader = min((hosts.first, hosts.second), key=lambda launcher: identity_of(launcher.process.pid))
    other = hosts.second if leader is hosts.first else hosts.first
    before = {*generations(other)}
    async with hosts.nobody_fails(other):
        rolling = asyncio.create_task(
            asyncio.to_thread(hosts.rollout, "workers.engine_args.num_gpu_blocks_override=3000")
        )
        await other.soon(lambda: before != {*generations(other)}, "a worker is replaced")
        leader.process.kill()
        leader.process.wait(30)
        said = await rolling
        await other.soon(lambda: all_new(other, before), "all are replaced")
    assert len(hosts.workers_of(other)) == 4, said
    with hosts.up("back") as back:
        assert any("the fleet runs what was rolled out last" in line for line in back.process_lines() + back.log)
        await back.soon(lambda: back.shape() == (2, 2), "roles are as before")
        assert hosts.workers_of(back) == {}, "nothing was missing"
        answers = await back.ask_all(PROMPTS, concurrency=8, max_tokens=MAX_TOKENS)
        assert [(a.status, a.error) for a in answers if not a.ok] == []
