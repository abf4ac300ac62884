"""The ratio control loop: the elected frontend turns the fleet's load into a desired xPyD, when `ratio.mode` is auto.

`policy.ratio` computes the split, and launchers change the roles. The elected frontend holds a lease in Redis. When it
dies, the next frontend that asks is elected, and observes a whole window before it decides.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterable

import msgspec

from orchestrator.config.engine_args import unit_size
from orchestrator.config.settings import Config
from orchestrator.fleet.view import Fleet
from orchestrator.fleet.worker_view import WorkerView
from orchestrator.policy.predict.estimates import LatestObjective
from orchestrator.policy.predict.predictor import Predictor
from orchestrator.policy.prefix_keys import ReuseCounter
from orchestrator.policy.ratio.decision import desired_ratio
from orchestrator.policy.ratio.load import (
    INTERVAL_S,
    WINDOW_SAMPLES,
    LoadSample,
    LoadSampler,
    Observation,
    offered_since,
)
from orchestrator.process.tasks import Turns
from orchestrator.process.telemetry.metrics import Metrics
from orchestrator.store.client import RedisAway
from orchestrator.store.operator.events import EventLog
from orchestrator.store.planned import Seen
from orchestrator.store.registry import Registry
from orchestrator.types import Offered, Role

log = logging.getLogger("pd.ratio")

LEASE_S = 5.0
_MIN_TRANSFERS = 10  # a worker's first WRITEs also connect, and make a link look slow


class RatioController:
    """The control loop. Every frontend runs one; only the elected one decides."""

    def __init__(
        self,
        frontend_id: str,
        config: Config,
        registry: Registry,
        events: EventLog,
        fleet: Fleet,
        predictor: Predictor,
        reuse: ReuseCounter,
        tpot: LatestObjective,
        metrics: Metrics | None = None,
        interval_s: float = INTERVAL_S,
    ) -> None:
        self._frontend_id, self._registry, self._fleet = frontend_id, registry, fleet
        self._events, self._predictor, self._reuse, self._tpot = events, predictor, reuse, tpot
        self._metrics = metrics or Metrics()
        self._ratio, self._slo, self._host_tier_bytes = config.ratio, config.slo, config.kv.host_tier_bytes
        self._unit_size = unit_size(config) if config.ratio.mode == "auto" else 1
        self._interval_s, self._tick_s = interval_s, min(interval_s, LEASE_S / 3)
        self._forget()

    def _forget(self) -> None:
        self.window: deque[LoadSample] = deque(maxlen=WINDOW_SAMPLES)
        self._sampler = LoadSampler()
        self._counted: dict[str, Offered] | None = None
        self._offered = Offered()
        self._next_sample_at = 0.0  # the loop's clock
        self._went = 0  # which way its last change went, as `desired_ratio` wants to know

    async def run(self) -> None:
        """Runs until cancelled; returns at once when it is off."""
        turns = Turns(log, "the automatic ratio")  # the frontends that led after this one would meet the same defect
        while self._ratio.mode == "auto":
            await asyncio.sleep(self._tick_s)
            with turns.turn():
                try:
                    await self._tick()
                except RedisAway as error:
                    log.debug("no ratio is decided without Redis: %s", error)
                    self._forget()

    async def _tick(self) -> None:
        now = await self._registry.lead(self._frontend_id, LEASE_S)
        if now is None:
            self._forget()
            return
        moment = asyncio.get_running_loop().time()
        if moment < self._next_sample_at:
            return
        self._next_sample_at = moment + self._interval_s - self._tick_s / 2
        await self._observe(now)
        await self._decide()

    async def _observe(self, now: float) -> None:
        counts = {name: frontend.offered for name, frontend in (await self._registry.frontends()).items()}
        if self._counted is not None:
            self._offered += offered_since(self._counted, counts)
        self._counted = counts
        views = list(self._fleet.workers.values())
        for view in _decoding(views):
            if view.load and not view.load.waiting_tokens:
                self._sampler.observe_step(view.load.running, view.load.step_ms / 1000)
        observation = observe(views, now, self._offered, self._host_tier_bytes)
        if observation is None:
            return
        sample = self._sampler.sample(observation, self._predictor, self._reuse.take())
        if sample is not None:
            self.window.append(sample)

    async def _decide(self) -> None:
        current = await self._registry.desired()
        if current is None or current.idle:
            return
        # In a thread: for a hundred workers it takes tens of milliseconds, and requests are not to wait for it.
        went = self._went if current.set_by == "ratio" else 0
        slo = msgspec.structs.replace(self._slo, tpot_s=self._tpot.seconds)
        decision = await asyncio.to_thread(
            desired_ratio, list(self.window), current, self._ratio, slo, unit_size=self._unit_size, went=went
        )
        if decision is None:
            return
        seen = Seen.ratio(current, self._frontend_id)  # an operator who has set it meanwhile means it
        if await self._registry.steer(seen, desired=decision.after) is None:
            return
        self._went = decision.more
        self._metrics.ratio_changes.inc()
        log.info("%s", decision)
        await self._events.note("decided", decision=str(decision))


def observe(views: Iterable[WorkerView], at: float, offered: Offered, host_tier_bytes: int = 0) -> Observation | None:
    """A sample of the fleet's load; None while no decode worker has reported its load. `host_tier_bytes`: of a rank."""
    views = list(views)
    decoding = _decoding(views)
    loads = [view.load for view in decoding if view.load is not None]
    if not loads:
        return None
    info = decoding[0].info
    block_size = info.identity.block_size
    former = sum(view.load.decodes for view in views if view.load is not None and view.info.role is Role.PREFILL)
    # WRITEs that share a link are slower than the link, and the fastest of all workers hardly shared it.
    sent = [view.load.kv for view in views if view.load is not None and view.load.kv.transfers >= _MIN_TRANSFERS]
    fastest = max((kv.link_bytes_per_s for kv in sent), default=0.0)
    return Observation(
        at=at,
        offered=offered,
        holding=sum(load.running for load in loads),
        waiting=sum(load.waiting for load in loads),
        held_tokens=sum(load.blocks_total - load.blocks_free for load in loads) * block_size,
        worker_tokens=sum(load.blocks_total for load in loads) * block_size // len(loads),
        worker_sequences=min(view.info.max_num_seqs for view in decoding),
        decode_workers=tuple(view.info.id for view in decoding),
        link_s_per_token=info.kv_bytes_per_token / fastest if fastest > 0 else 0.0,
        host_tokens=host_tier_bytes * info.kv.tp_size // max(1, info.kv_bytes_per_token),
        former=former,
    )


def _decoding(views: Iterable[WorkerView]) -> list[WorkerView]:
    return [view for view in views if view.info.role is Role.DECODE and view.load is not None]
