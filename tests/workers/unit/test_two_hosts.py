"""Ranks of a group as processes on two hosts: one here, one in a network namespace, as service managers run them."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from support_fleet import ROOT
from support_redis import fresh_namespace
from support_second_host import HERE, THERE, cut, redis_between, running_second_host
from support_wait import DEADLINE_S

from orchestrator.process.parent import EXIT_AGAIN
from orchestrator.store.client import connect
from orchestrator.store.registry import Registry

pytestmark = [pytest.mark.slow, pytest.mark.topology, pytest.mark.timeout(300)]

RANKS = ("d", "d.1")
CONFIG: dict[str, Any] = {
    "model": "demo",
    "engine": "sim",
    "ratio": {"mode": "off"},
    "workers": {"bind": "auto", "timeout_s": 1, "decode": {"engine_args": {"data_parallel_size": 2}}},
}


@pytest.fixture(scope="module")
def second_host() -> Iterator[list[str]]:
    with running_second_host() as command:
        yield command


@pytest.fixture(scope="module")
def redis_url(second_host: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with redis_between(tmp_path_factory.mktemp("redis")) as url:
        yield url


class HandGroup:
    def __init__(self, folder: Path, redis_url: str, second_host: list[str], trusted: bool) -> None:
        self._namespace, self._url = fresh_namespace(), redis_url
        self._file = folder / "fleet.yaml"
        security = {"trust_network": trusted}
        self._file.write_text(yaml.safe_dump(CONFIG | {"namespace": self._namespace, "security": security}))
        self._hosts = dict(zip(RANKS, ([], second_host), strict=True))
        self.processes: dict[str, subprocess.Popen[str]] = {}

    def start(self, *names: str) -> None:
        for name in names:
            command = [*self._hosts[name], sys.executable, "-m", "workers.main", "decode", "--redis", self._url]
            command += ["--config", str(self._file), "--id", name, "--ranks", ",".join(RANKS)]
            self.processes[name] = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)

    def until_complete(self) -> dict[str, str]:
        """The host of each rank. One that ended to be started again, since its old entry was still there, is."""
        deadline = time.monotonic() + DEADLINE_S
        while len(hosts := asyncio.run(self._registered())) < len(RANKS):
            assert time.monotonic() < deadline, f"only {hosts} have come"
            self.start(*(name for name, process in self.processes.items() if process.poll() == EXIT_AGAIN))
            time.sleep(0.1)
        return hosts

    async def _registered(self) -> dict[str, str]:
        """By the processes that run now."""
        redis = await connect(self._url, 5)
        try:
            workers = await Registry(redis, self._namespace).workers()
        finally:
            await redis.aclose()
        pids = {name: process.pid for name, process in self.processes.items()}
        return {name: worker.host for name, worker in workers.items() if worker.pid == pids.get(name)}

    def exit_code(self, name: str) -> int:
        return self.processes[name].wait(DEADLINE_S)

    def said(self, name: str) -> str:
        return self.processes[name].communicate(timeout=DEADLINE_S)[1]

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.communicate()


@pytest.fixture
def group(
    tmp_path: Path, redis_url: str, second_host: list[str], request: pytest.FixtureRequest
) -> Iterator[HandGroup]:
    made = HandGroup(tmp_path, redis_url, second_host, trusted=getattr(request, "param", True))
    made.start(*RANKS)
    yield made
    made.close()


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_group_ends_with_any_rank_and_comes_back(group: HandGroup, rank: str, how: signal.Signals) -> None:
    assert group.until_complete() == {"d": HERE, "d.1": THERE}
    (other,) = set(RANKS) - {rank}
    group.processes[rank].send_signal(how)
    assert group.exit_code(other) == 1
    # Of one that has ended its engine may hear first.
    assert ("has ended" if how is signal.SIGKILL else f"{rank} has been silent for 4 s") in group.said(other)
    group.start(other)  # before the other one: it waits
    group.processes[rank].kill()
    group.exit_code(rank)
    group.start(rank)
    assert group.until_complete() == {"d": HERE, "d.1": THERE}


def test_hosts_that_do_not_reach_each_other_end_their_ranks(group: HandGroup) -> None:
    """Packets are dropped, so that no connection breaks."""
    assert group.until_complete() == {"d": HERE, "d.1": THERE}
    cut(True)
    try:
        assert [group.exit_code(name) for name in RANKS] == [1, 1]
        assert "d.1 has been silent" in group.said("d") and "d has been silent" in group.said("d.1")
        group.start("d")
    finally:
        cut(False)
    group.start("d.1")
    assert group.until_complete() == {"d": HERE, "d.1": THERE}


def test_ranks_that_are_told_to_end_leave_in_order(group: HandGroup) -> None:
    group.until_complete()
    for process in group.processes.values():
        process.terminate()
    assert [group.exit_code(name) for name in RANKS] == [0, 0]


@pytest.mark.parametrize("group", [False], indirect=True)
def test_several_hosts_need_a_network_of_their_own(group: HandGroup) -> None:
    assert [group.exit_code(name) for name in RANKS] == [2, 2]
    assert all(f"several hosts ({HERE}, {THERE})" in group.said(name) for name in RANKS)
