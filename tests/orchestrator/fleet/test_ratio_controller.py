"""The elected ratio controller on a real server: election, fencing, what it looks at and what it changes."""

import asyncio
import contextlib
import time

import msgspec
import pytest
from support_info import connects
from support_redis import fresh_namespace, worker
from support_steering import set_desired
from support_wait import DEADLINE_S, until

from orchestrator.config.settings import SLOConfig, parse_config
from orchestrator.fleet import ratio_controller as controller
from orchestrator.fleet.ratio_controller import RatioController, observe
from orchestrator.fleet.view import Fleet
from orchestrator.policy.policies import latest_tpot
from orchestrator.policy.predict.estimates import LATEST
from orchestrator.policy.predict.predictor import Predictor
from orchestrator.policy.prefix_keys import ReuseCounter
from orchestrator.policy.ratio import decision
from orchestrator.process.tasks import cancelled
from orchestrator.store.operator.events import EventLog
from orchestrator.store.planned import Seen
from orchestrator.store.registry import Frontend, Registry
from orchestrator.types import DesiredRatio, KVCounters, Offered, Role, WorkerLoad


@pytest.fixture
def registry(redis):
    namespace = fresh_namespace()
    registry = Registry(redis, namespace)
    registry.redis, registry.log = redis, EventLog(redis, namespace)
    return registry


# ---- election --------------------------------------------------------------------------------------------------


async def test_one_leads_until_its_lease_runs_out(registry):
    assert await registry.lead("a", 30.0) == pytest.approx(time.time(), abs=60)
    assert await registry.lead("b", 30.0) is None
    assert await registry.lead("a", 0.05) is not None, "its own lease is renewed"
    await until(lambda: registry.lead("b", 30.0), "another leads once the lease is over")
    assert await registry.lead("a", 30.0) is None


async def test_only_leader_changes_ratio_it_has_read(registry):
    await set_desired(registry, 3, 1, "scale")
    seen, wanted = await registry.desired(), DesiredRatio(2, 2, "ratio")
    assert await registry.steer(Seen.ratio(seen, "a"), desired=wanted) is None, "nobody was elected"
    await registry.lead("a", 30.0)
    assert await registry.steer(Seen.ratio(seen, "b"), desired=wanted) is None
    await set_desired(registry, 3, 1, "scale")  # again: the operator means it
    assert await registry.steer(Seen.ratio(seen, "a"), desired=wanted) is None
    assert (await registry.desired()).set_by == "scale"
    assert await registry.steer(Seen.ratio(await registry.desired(), "a"), desired=wanted) == []
    ratio = await registry.desired()
    assert (ratio.prefill, ratio.decode, ratio.set_by) == (2, 2, "ratio") and ratio.set_at >= seen.set_at


async def test_load_counts_publish_no_event(registry):
    await registry.refresh_frontend(Frontend("f", "http://x", "1"), 60)
    async with contextlib.aclosing(registry.redis.listen(registry.keys.events)) as told:
        await anext(told)
        await registry.refresh_frontend(Frontend("f", "http://x", "1", offered=Offered(3, 400, 50.5)), 60)
        await registry.refresh_frontend(Frontend("f", "http://y", "1", offered=Offered(4, 500, 60.5)), 60)
        assert (await registry.frontends())["f"].offered == Offered(4, 500, 60.5)
        await registry.redis.publish(registry.keys.events, "the end")
        assert [await anext(told), await anext(told)] == [b"", b"the end"], "one change only: that of the URL"


# ---- looking ---------------------------------------------------------------------------------------------------


def load(name, running=0, waiting=0, free=512, waiting_tokens=0):
    return WorkerLoad(name, 1, 512, free, running, waiting, waiting_tokens, step_ms=10.0)


def fleet_of(*roles, **loads):
    fleet = Fleet("f")
    for number, role in enumerate(roles):
        info = worker(f"w{number}", role)
        connects(fleet, info)
        fleet.take_load(load(info.id, **(loads if role is Role.DECODE else {})), 0.0)
    return fleet


P, D = Role.PREFILL, Role.DECODE


def test_observation_sums_decode_workers():
    fleet = fleet_of(P, D, D, running=5, waiting=2, free=412)
    look = observe(fleet.workers.values(), 9.0, Offered(1, 2, 3.0))
    assert (look.holding, look.waiting, look.held_tokens) == (10, 4, 2 * 100 * 16)
    assert (look.worker_tokens, look.worker_sequences, look.host_tokens) == (512 * 16, 64, 0)
    kv_bytes = next(iter(fleet.workers.values())).info.kv_bytes_per_token
    assert observe(fleet.workers.values(), 9.0, Offered(), 3000 * kv_bytes).host_tokens == 6000, "of two ranks"
    assert [fleet.workers[name].info.role for name in look.decode_workers] == [D, D]


def test_what_prefill_workers_still_decode_is_observed():
    fleet = fleet_of(P, P, D, running=5)
    for name in ("w0", "w2"):
        fleet.take_load(msgspec.structs.replace(fleet.workers[name].load, decodes=4, sequence=9), 0.0)
    assert observe(fleet.workers.values(), 9.0, Offered()).former == 4, "not those of a decode worker"


def test_link_is_as_fast_as_the_fastest_write_of_any_worker():
    fleet = fleet_of(P, P, D)
    assert observe(fleet.workers.values(), 9.0, Offered()).link_s_per_token == 0, "no KV has been sent"
    for name, rate, transfers in (("w0", 2e6, 1), ("w0", 2e9, 50), ("w1", 8e9, 50)):
        kv = KVCounters(transfers=transfers, link_bytes_per_s=rate)
        fleet.take_load(msgspec.structs.replace(fleet.workers[name].load, kv=kv, sequence=8 + transfers), 0.0)
        if transfers == 1:
            look = observe(fleet.workers.values(), 9.0, Offered())
            assert look.link_s_per_token == 0, "a first WRITE also connects"
    bytes_per_token = fleet.workers["w2"].info.kv_bytes_per_token
    assert observe(fleet.workers.values(), 9.0, Offered()).link_s_per_token == pytest.approx(bytes_per_token / 8e9)


def test_nothing_is_observed_without_decode_workers():
    assert observe(fleet_of(P).workers.values(), 9.0, Offered()) is None


# ---- deciding --------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Five samples are a window."""
    monkeypatch.setattr("orchestrator.policy.ratio.load.WINDOW_SAMPLES", 5)
    monkeypatch.setattr(controller, "WINDOW_SAMPLES", 5)
    monkeypatch.setattr(decision, "COOL_DOWN_S", 0.01)


@contextlib.asynccontextmanager
async def running(registry, fleet, frontend_id="f", tpot=latest_tpot(SLOConfig(), Predictor()), **ratio):
    config = parse_config({"model": "m", "ratio": {"mode": "auto", **ratio}})
    learned = Predictor(0.0005), ReuseCounter(), tpot
    ratio_controller = RatioController(frontend_id, config, registry, registry.log, fleet, *learned, interval_s=0.02)
    task = asyncio.create_task(ratio_controller.run())
    try:
        yield ratio_controller
        assert not task.done() or task.exception() is None
    finally:
        await cancelled(task)


async def is_desired(registry, prefill, decode):
    ratio = await registry.desired()
    return ratio if ratio is not None and (ratio.prefill, ratio.decode) == (prefill, decode) else None


async def observed(ratio_controller):
    """Until it has a full window twice."""
    for _ in range(2):
        ratio_controller.window.clear()

        async def full():
            return len(ratio_controller.window) == ratio_controller.window.maxlen

        await until(full, "a full window")


@contextlib.asynccontextmanager
async def offering(registry, prompt_tokens, output_tokens):
    """A frontend that counts ten requests more every few milliseconds."""

    async def count():
        for tens in range(1, 10_000):
            n = 10 * tens
            tokens, squares = n * prompt_tokens, float(n * prompt_tokens**2)
            offered = Offered(n, tokens, float(n * output_tokens), 0, 0, 0, squares, tokens, squares, tokens, squares)
            await registry.refresh_frontend(Frontend("g", "", "1", offered=offered), 60)
            await asyncio.sleep(0.005)

    await registry.refresh_frontend(Frontend("g", "", "1"), 60)
    task = asyncio.create_task(count())
    try:
        yield
    finally:
        await cancelled(task)


LONG_PROMPTS, LONG_ANSWERS = (4000, 1), (1, 4000)


async def test_long_answers_move_all_prefill_workers_and_are_logged(registry):
    await set_desired(registry, 3, 1, "launcher")
    async with running(registry, fleet_of(P, P, P, D, running=64, waiting=190)), offering(registry, *LONG_ANSWERS):
        ratio = await until(lambda: is_desired(registry, 0, 4), "every worker prefills what it decodes")
        assert ratio.set_by == "ratio" and "of what arrives can be in time" in ratio.why
    history = [event.fields["decision"] for event in await registry.log.read() if event.type == "decided"]
    assert [line.split(":")[0] for line in history] == ["3P1D -> 0P4D"]
    assert "requests/s" in history[0]


async def test_shift_to_prefill_keeps_min_decode(registry):
    await set_desired(registry, 0, 4, "launcher")
    async with (
        running(registry, fleet_of(P, D, D, D), min_decode=2) as mine,
        offering(registry, *LONG_PROMPTS),
    ):
        await until(lambda: is_desired(registry, 2, 2), "prefill workers come back")
        await observed(mine)
        assert await is_desired(registry, 2, 2)


async def test_it_knows_which_way_its_own_last_change_went(registry, monkeypatch):
    asked = []

    def noted(*args, went, **more):
        asked.append(went)
        return decision.desired_ratio(*args, went=went, **more)

    monkeypatch.setattr(controller, "desired_ratio", noted)
    await set_desired(registry, 0, 4, "launcher")
    async with running(registry, fleet_of(P, D, D, D), min_decode=2), offering(registry, *LONG_PROMPTS):
        await until(lambda: is_desired(registry, 2, 2), "prefill workers come back")
        assert asked[0] == 0
        await until(lambda: asked[-1] > 0, "more prefill by its own change")
        await set_desired(registry, 2, 2, "scale")
        await until(lambda: asked[-1] == 0, "an operator's change goes no way")


async def test_the_split_is_for_the_tpot_objective_of_the_latest_requests(registry, monkeypatch):
    asked = []
    monkeypatch.setattr(controller, "desired_ratio", lambda window, current, config, slo, **_: asked.append(slo))
    await set_desired(registry, 3, 1, "launcher")
    tpot = latest_tpot(SLOConfig(), Predictor())
    async with running(registry, fleet_of(P, P, P, D), tpot=tpot):
        await until(lambda: asked, "a first look")
        assert asked[-1] == SLOConfig()
        for _ in range(LATEST):
            tpot.came(0.03)
        await until(lambda: asked[-1] == SLOConfig(tpot_s=0.03), "theirs")


@pytest.mark.parametrize("why", ["idle", "cooling down after the operator", "another leads", "nothing was set"])
async def test_ratio_is_kept_while(registry, why, monkeypatch):
    if why != "nothing was set":
        await set_desired(registry, 3, 1, "scale")
    if why == "cooling down after the operator":
        monkeypatch.setattr(decision, "COOL_DOWN_S", 600.0)
    if why == "another leads":
        await registry.lead("other", 600.0)
    load = contextlib.nullcontext() if why == "idle" else offering(registry, *LONG_ANSWERS)
    async with load, running(registry, fleet_of(P, P, P, D)) as mine:
        if why == "another leads":
            await asyncio.sleep(0.3)
            assert not mine.window
        else:
            await observed(mine)
    assert await registry.desired() is None if why == "nothing was set" else await is_desired(registry, 3, 1)
    assert not [event for event in await registry.log.read() if event.type == "decided"]


async def test_when_the_leader_dies_another_goes_on(registry, monkeypatch):
    monkeypatch.setattr(controller, "LEASE_S", 0.3)
    await set_desired(registry, 3, 1, "launcher")
    fleet = fleet_of(P, P, P, D, running=64, waiting=190)
    async with running(registry, fleet_of(P, P, P, D), "first") as first:
        await observed(first)
    assert await is_desired(registry, 3, 1)
    async with running(registry, fleet, "second"), offering(registry, *LONG_ANSWERS):
        await until(lambda: is_desired(registry, 0, 4), "the second decides")
    assert await registry.redis.get(f"{registry.keys.prefix}ratio_leader") in (b"second", None)


async def test_a_defect_of_its_rules_ends_no_frontend(registry, monkeypatch, caplog):
    """The next one would lead then, and meet it too."""
    tries = []

    def trip(*args, **more):
        tries.append(None)
        return decision.desired_ratio(*args, **more) if len(tries) > 3 else 1 // 0

    monkeypatch.setattr(controller, "desired_ratio", trip)
    await set_desired(registry, 3, 1, "launcher")
    async with running(registry, fleet_of(P, P, P, D, running=64, waiting=190)), offering(registry, *LONG_ANSWERS):
        await until(lambda: is_desired(registry, 0, 4), "it decides once the rules do")
    assert "the automatic ratio: failed, and is tried again" in caplog.text and "ZeroDivisionError" in caplog.text


async def test_ratio_mode_off_changes_nothing(registry):
    config = parse_config({"model": "m", "ratio": {"mode": "off"}})
    mine = RatioController(
        "f",
        config,
        registry,
        registry.log,
        Fleet("f"),
        Predictor(),
        ReuseCounter(),
        latest_tpot(config.slo, Predictor()),
    )
    await asyncio.wait_for(mine.run(), DEADLINE_S)
    assert await registry.redis.exists(f"{registry.keys.prefix}ratio_leader") == 0
