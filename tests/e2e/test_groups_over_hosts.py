"""A data-parallel group on two hosts, started by hand: one rank here, one in a network namespace. Beside it a group of
the launcher's, which stands in. Engines are simulated, in lockstep over the network."""

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
from support_client import nobody_fails
from support_fleet import ROOT, RunningFleet, running_fleet, token_prompt
from support_second_host import HERE, THERE, HandWorker, cut

pytestmark = [pytest.mark.vllm, pytest.mark.topology, pytest.mark.timeout(600)]

PROMPTS = [token_prompt(20 + 173 * i % 1800, seed=i) for i in range(24)]
MAX_TOKENS, USERS = 60, 8
RANKS = ("d", "d.1")
SETS = (
    "ratio.mode=off",
    "workers.decode.engine_args.data_parallel_size=2",
    "workers.prefill.replicas=1",
    "workers.decode.replicas=1",
    "workers.bind=auto",
    "workers.timeout_s=2",
    "security.trust_network=true",
    "routing.remote_prefill_min_tokens=100",
    "workers.engine_args.enable_prefix_caching=false",
)


@pytest.fixture(scope="module")
def fleet(redis_url: str) -> Iterator[RunningFleet]:
    with running_fleet("sim-2p2d.yaml", *SETS, f"redis.url={redis_url}") as running:
        yield running


@pytest.fixture(scope="module")
def group(fleet: RunningFleet, second_host: list[str]) -> Iterator[list[HandWorker]]:
    hosts: list[list[str]] = [[], second_host]
    ranks = [HandWorker(fleet, name, host, "--ranks", ",".join(RANKS)) for name, host in zip(RANKS, hosts, strict=True)]
    yield ranks
    ranks[0].stop(*ranks[1:])


def there(fleet: RunningFleet) -> dict[str, str]:
    return {worker["id"]: worker["host"] for worker in fleet.workers() if worker["unit"] == "d"}


def until_complete(fleet: RunningFleet, group: list[HandWorker]) -> None:
    for rank in group:
        rank.until_joined(fleet)
    assert there(fleet) == dict(zip(RANKS, (HERE, THERE), strict=True))
    fleet.until(lambda: fleet.shape() == (1, 4), "two decode groups")


async def test_ranks_meet_over_the_network_and_serve(fleet: RunningFleet, group: list[HandWorker]) -> None:
    await asyncio.to_thread(until_complete, fleet, group)
    async with nobody_fails([fleet], PROMPTS, USERS, MAX_TOKENS):
        await fleet.soon(
            lambda: {line["decode_worker"] for line in fleet.request_lines()} >= set(RANKS), "both ranks decode"
        )
        await fleet.soon(lambda: fleet.metric("pd_group_most_tokens_total") > 0, "the launcher's group is measured")
    measured = {worker["unit"] for worker in fleet.fleet()["workers"] if worker["group"] is not None}
    assert measured and "d" not in measured, "ranks of several hosts share no board"


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_group_ends_with_any_rank_and_comes_back(
    fleet: RunningFleet, group: list[HandWorker], rank: int, how: signal.Signals
) -> None:
    await asyncio.to_thread(until_complete, fleet, group)
    victim, other = group[rank], group[1 - rank]
    async with nobody_fails([fleet], PROMPTS, USERS, MAX_TOKENS):
        await fleet.soon(lambda: all(w["running"] for w in fleet.workers("decode")), "each rank decodes")
        victim.process.send_signal(how)
        assert await asyncio.to_thread(other.exit_code) == 1
        victim.process.kill()  # as its service manager does, or Kubernetes by its liveness probe
        await asyncio.to_thread(victim.exit_code)
        other.start()  # at once; the other one later
        victim.start()
        await asyncio.to_thread(until_complete, fleet, group)


async def test_hosts_that_do_not_reach_each_other_give_their_ranks_up(
    fleet: RunningFleet, group: list[HandWorker]
) -> None:
    """Packets are dropped, so that no connection breaks."""
    await asyncio.to_thread(until_complete, fleet, group)
    async with nobody_fails([fleet], PROMPTS, USERS, MAX_TOKENS):
        await fleet.soon(lambda: all(w["running"] for w in fleet.workers("decode")), "each rank decodes")
        cut(True)
        try:
            seen = len(fleet.request_lines())
            await fleet.soon(lambda: len(fleet.request_lines()) > seen + USERS, "requests continue elsewhere")
            codes = await asyncio.gather(*(asyncio.to_thread(rank.exit_code) for rank in group))
        finally:
            cut(False)
        assert codes == [1, 1]
        for rank in group:
            rank.start()
        await asyncio.to_thread(until_complete, fleet, group)


async def test_group_is_restarted_and_drained_as_one(fleet: RunningFleet, group: list[HandWorker]) -> None:
    await asyncio.to_thread(until_complete, fleet, group)
    async with nobody_fails([fleet], PROMPTS, USERS, MAX_TOKENS):
        restart = asyncio.create_task(asyncio.to_thread(fleet.cli, "restart", "--role", "decode"))
        codes = await asyncio.gather(*(asyncio.to_thread(rank.exit_code) for rank in group))
        assert codes == [75, 75]
        for rank in group:
            rank.start()
        await restart
        await asyncio.to_thread(until_complete, fleet, group)
        await asyncio.to_thread(fleet.cli, "drain", "d.1")
        codes = await asyncio.gather(*(asyncio.to_thread(rank.exit_code) for rank in group))
        assert codes == [0, 0], "drained: not to be started again"
    fleet.assert_no_leaks()


def test_the_doctor_tells_whether_another_host_reaches_the_rank_that_waits(
    fleet: RunningFleet, group: list[HandWorker], second_host: list[str], redis_url: str
) -> None:
    command = [*second_host, sys.executable, "-m", "orchestrator.cli.main", "doctor", "ports", HERE, "--json"]
    command += ["--redis", redis_url, "--namespace", fleet.namespace]

    def told() -> list[str]:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
        return [check["level"] for check in json.loads(done.stdout) if f"d: {HERE}:" in str(check)]

    group[0].stop(*group[1:])
    assert told() == []
    group[0].start()
    fleet.until(lambda: told() == ["ok"], "it waits, and is reached from there")
    group[1].start()
    until_complete(fleet, group)
