"""Data-parallel groups of simulated engines in lockstep: 1 prefill group and 2 decode groups of two ranks. A group
joins, flips, drains and dies as one, under streaming load that nobody sees fail."""

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest
from support_client import LONG_STEPS, nobody_fails
from support_fleet import RunningFleet, running_fleet, token_prompt

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

PROMPTS = [token_prompt(20 + 173 * i % 1800, seed=i) for i in range(24)]
MAX_TOKENS, USERS = 60, 8
SHAPE = (2, 4)  # ranks
SETS = (
    "workers.engine_args.data_parallel_size=2",
    "workers.prefill.replicas=1",
    "workers.decode.replicas=2",
    "workers.timeout_s=2",
    "routing.remote_prefill_min_tokens=100",
    "workers.engine_args.enable_prefix_caching=false",
    LONG_STEPS,
)


@pytest.fixture(scope="module")
def fleet() -> Iterator[RunningFleet]:
    with running_fleet("sim-2p2d.yaml", *SETS) as running:
        yield running


@pytest.fixture(autouse=True)
def healed(fleet: RunningFleet) -> Iterator[None]:
    yield
    fleet.until(lambda: fleet.shape() == SHAPE, "1 prefill group and 2 decode groups are ready")
    fleet.assert_no_leaks()


def units(fleet: RunningFleet, role: str) -> list[str]:
    return sorted({worker["unit"] for worker in fleet.workers(role)})


def test_ranks_are_shown_with_their_group(fleet: RunningFleet) -> None:
    decode = fleet.workers("decode")
    assert [(w["unit"], w["rank"], w["ranks"]) for w in decode[:2]] == [
        (decode[0]["id"], 0, 2),
        (decode[0]["id"], 1, 2),
    ]
    assert "1 of 2" in fleet.cli("status").stdout


async def test_every_rank_gets_requests_and_prefills(fleet: RunningFleet) -> None:
    async with nobody_fails([fleet], PROMPTS, USERS, MAX_TOKENS):
        await fleet.soon(lambda: all(w["running"] for w in fleet.workers("decode")), "each rank decodes")
        await fleet.soon(
            lambda: len({line["prefill_worker"] for line in fleet.request_lines() if line.get("prefill_worker")}) == 2,
            "both ranks have prefilled",
        )
    await fleet.soon(lambda: fleet.metric("pd_group_most_tokens_total") > 0, "steps are counted")
    assert 0.5 <= fleet.metric("pd_group_mean_tokens_total") / fleet.metric("pd_group_most_tokens_total") <= 1
    assert "lost to imbalance" in (await asyncio.to_thread(fleet.cli, "status")).stdout


@pytest.mark.parametrize(("rank", "how"), [(0, signal.SIGSTOP), (1, signal.SIGKILL)])
async def test_group_ends_with_any_rank_and_is_started_again(
    fleet: RunningFleet, rank: int, how: signal.Signals
) -> None:
    before = fleet.pids()
    group = [worker for worker in fleet.workers("decode") if worker["unit"] == units(fleet, "decode")[-1]]
    async with nobody_fails([fleet], PROMPTS, USERS, MAX_TOKENS):
        mine = {worker["id"] for worker in group}
        await fleet.soon(lambda: any(w["running"] for w in fleet.workers() if w["id"] in mine), "it decodes")
        os.kill(group[rank]["pid"], how)
        await fleet.soon(lambda: not {w["pid"] for w in group} & {*fleet.pids().values()}, "both ranks are gone")
        await fleet.soon(lambda: fleet.shape() == SHAPE, "the group is back")
    after = fleet.pids()
    names = {worker["id"] for worker in group}
    assert {name for name in before if before[name] != after[name]} == names, "another group was restarted"


async def test_group_changes_its_role_as_one(fleet: RunningFleet) -> None:
    moved = units(fleet, "decode")[-1]
    async with nobody_fails([fleet], PROMPTS, USERS, MAX_TOKENS):
        await asyncio.to_thread(fleet.cli, "role", f"{moved}.1", "prefill")  # any of its ranks names it
        mixed = []

        def flipped() -> bool:
            roles = {worker["role"] for worker in fleet.fleet()["workers"] if worker["unit"] == moved}
            mixed.append(len(roles) > 1)
            return fleet.shape() == (4, 2)

        await fleet.soon(flipped, "a decode group prefills")
        assert not any(mixed), "its ranks had different roles for a while"
        await asyncio.to_thread(fleet.cli, "role", moved, "decode")
        await fleet.soon(lambda: fleet.shape() == SHAPE, "it decodes again")
    assert len(fleet.workers()) == sum(SHAPE)


async def test_scale_counts_groups(fleet: RunningFleet) -> None:
    async with nobody_fails([fleet], PROMPTS, USERS, MAX_TOKENS):
        await asyncio.to_thread(fleet.cli, "scale", "decode=1")
        await fleet.soon(lambda: fleet.shape() == (2, 2), "a group has left")
        await asyncio.to_thread(fleet.cli, "scale", "decode=2")
        await fleet.soon(lambda: fleet.shape() == SHAPE, "a group has come")


async def test_groups_are_restarted_one_after_the_other(fleet: RunningFleet) -> None:
    before = fleet.pids()
    async with nobody_fails([fleet], PROMPTS, USERS, MAX_TOKENS):
        done = await asyncio.to_thread(fleet.cli, "restart", "--role", "decode")
        await fleet.soon(lambda: fleet.shape() == SHAPE, "all are ready")
    assert "2 workers restarted" in done.stdout
    assert {name for name, pid in fleet.pids().items() if before.get(name) == pid} == {
        worker["id"] for worker in fleet.workers("prefill")
    }
