"""All policies of a configuration behind one class: placement, admission, and the order of the queue.

The router and the simulator both decide through it, so that a simulation runs the policies that serve.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import TypeVar

import msgspec

from orchestrator.config.settings import Config, SLOConfig
from orchestrator.policy.decode_choice import Candidate, DecodeChoice, RequestInfo, blocks_for
from orchestrator.policy.placement import (
    ITL_MARGIN,
    ROOM_SHARE,
    Decision,
    Local,
    PrefillView,
    Reject,
    Remote,
    place,
    predicted_ttft_s,
    uncached_tokens,
)
from orchestrator.policy.predict.adapters import LOADS_AT_PREFILL, AdapterDemand, AdapterPlaces, priced
from orchestrator.policy.predict.estimates import LatestObjective
from orchestrator.policy.predict.pairing import pair
from orchestrator.policy.predict.predictor import Predictor
from orchestrator.policy.shares import Shares
from orchestrator.types import Link, QueueDepth

Job = TypeVar("Job")
MIN_RETRY_S, MAX_RETRY_S = 1.0, 60.0  # of a `Retry-After` that is predicted
TPOT_BROUGHT_BY = 1 / 2  # of the latest requests, for a tighter TPOT objective than the fleet's: it costs others room
# TTFT objectives by which a job that will be late goes behind the others, and at most one whose tenant asks too much.
LATE_OBJECTIVES = 5.0
QUEUE_WEIGHT = 1.0  # the same in the prefill queue: short prompts overtake long ones by the difference of their times
ENGINE_WEIGHT = 30.0  # seconds behind its arrival per second of prefill; `engine_delay_s` explains why
# How long a request beyond its tenant's share may wait, in prefill times of its whole prompt. Others wait behind what
# is lent: more would raise their TTFT by over a fifth where an engine step computes one prompt.
LENT_WAIT_SHARE = 0.25
_ROUNDING_S = 1e-6
MAX_STEPS = 10  # of priority: clients choose it, and none may overtake without bound
# Between two recalls. More frequent ones would move jobs for advantages that soon pass.
RECALL_S = 1.0
MAX_RECALL_JOBS = 256  # jobs at the head of the queue that one recall considers; the others wait behind them anyway


class PlacementDecision(msgspec.Struct, frozen=True):
    """`later_s`: by how much the request goes behind its place in a queue, because it is predicted to miss its TTFT
    objective and others can meet theirs, or because its tenant asks for more than its share."""

    decision: Decision
    later_s: float = 0.0


class Waiting(msgspec.Struct, frozen=True):
    """A request that waits in the queue, and the inputs for placing it now."""

    request: RequestInfo
    uncached_tokens: int
    candidates: Sequence[Candidate]
    cached_at_prefill: int  # prompt tokens cached on the prefill worker with most of them
    adapter_tokens: int = 0  # as in `PrefillView`


class RecalledLoad(msgspec.Struct, frozen=True):
    """The load that one recall has sent to a worker, and that the worker's candidates do not show yet."""

    requests: float = 0.0
    blocks: float = 0.0
    tokens: float = 0.0  # prompt tokens to compute there

    def plus(self, request: RequestInfo, candidate: Candidate, times: float) -> RecalledLoad:
        """The sum of this and `times` requests like this one."""
        blocks = blocks_for(request.prompt_tokens, candidate.block_size)
        tokens = uncached_tokens(request, candidate)
        return RecalledLoad(self.requests + times, self.blocks + times * blocks, self.tokens + times * tokens)


class Policies:
    """The caller feeds `choose` and `predictor` with measured times and with the output lengths of ended requests, and
    `tpot` with the TPOT objectives of those that came."""

    def __init__(
        self, config: Config, choose: DecodeChoice, predictor: Predictor, tpot: LatestObjective | None = None
    ) -> None:
        self.routing, self.slo = config.routing, config.slo
        self.choose, self.predictor = choose, predictor
        self._shares = Shares(config.limits.shares) if config.limits.shares else None  # None: nobody is delayed
        self._tpot, self.adapters = tpot or latest_tpot(config.slo, predictor), AdapterDemand()

    def decide(
        self,
        request: RequestInfo,
        candidates: Sequence[Candidate],
        prefill: PrefillView,
        now: float,
        admission: bool = True,
        counted: bool = False,
    ) -> PlacementDecision:
        """Where a request goes. `now`: seconds of a clock that never goes back. A request that was accepted before
        needs no `admission`: its predicted TTFT neither rejects nor defers it. One that was `counted` is decided again,
        since what was decided could not be done: it asks for no more of its adapter or its tenant's share."""
        self.predictor.begin(now)
        if admission and request.adapter and not counted:
            self.adapters.count(request.adapter)
        placed = self._admitted(request, candidates, prefill, admission)
        if admission and self._shares is not None:
            placed = self._shared(self._shares, placed, request, candidates, prefill, now, counted)
        if isinstance(placed.decision, Remote):
            self.predictor.placed_remotely(max(0, request.prompt_tokens - prefill.cached_tokens))
        elif isinstance(placed.decision, Local):
            self.predictor.placed_locally(placed.decision.worker_id)
        return placed

    def priced(self, adapter: int, candidates: list[Candidate], places: AdapterPlaces) -> list[Candidate]:
        """The candidates, with what a request spends on its LoRA adapter there. 0: it has none."""
        predictor = self.predictor
        s_per_token = predictor.s_per_token if adapter else 0.0
        if not s_per_token:
            return candidates
        load_s, rest_s = predictor.adapter_load_s, predictor.rest_s
        return priced(candidates, adapter, places, load_s, rest_s, s_per_token, self.adapters)

    def at_prefill(self, adapter: int, places: AdapterPlaces) -> tuple[dict[str, int], int]:
        """What the prefill workers save, in prompt tokens, that a job names as having its adapter; and what it spends
        there if none has."""
        load_tokens = self.predictor.adapter_load_tokens if adapter else 0
        if not load_tokens:
            return {}, 0
        holders = places.holders(adapter)
        return ({}, LOADS_AT_PREFILL * load_tokens) if holders is None else (dict.fromkeys(holders, load_tokens), 0)

    def _shared(
        self,
        shares: Shares,
        placed: PlacementDecision,
        request: RequestInfo,
        candidates: Sequence[Candidate],
        prefill: PrefillView,
        now: float,
        counted: bool,
    ) -> PlacementDecision:
        """Requests go behind others by the lead of their tenant's clock. One whose lead is beyond a burst gets what
        others leave: it is refused where it would have to wait."""
        decision, slo = placed.decision, self.slo_of(request)
        if isinstance(decision, Reject):
            return placed
        burst_s = LATE_OBJECTIVES * self.slo.ttft_s
        lead_s = shares.lead_s(request.tenant, now)
        prefill_s = self.predictor.prefill_s(max(0, request.prompt_tokens - prefill.cached_tokens))
        if isinstance(decision, Remote):
            handed_over_s = self.predictor.transfer_s(request.prompt_tokens)
        else:
            handed_over_s = self.predictor.itl_s(decision.worker_id)
        wait_s = predicted_ttft_s(decision, request, candidates, prefill, self.predictor) - prefill_s
        # A short prompt spends most of its time being handed over, which is no waiting.
        lent_s = handed_over_s if prefill_s < 2 * handed_over_s else LENT_WAIT_SHARE * prefill_s
        may_wait_s = min(ROOM_SHARE * slo.ttft_s, lent_s + _ROUNDING_S)
        if lead_s > burst_s and wait_s > may_wait_s and not _is_idle(candidates, prefill.queue):
            return PlacementDecision(Reject("over_share", min(MAX_RETRY_S, max(MIN_RETRY_S, lead_s - burst_s))))
        if counted:
            return PlacementDecision(decision, lead_s)
        decoding = max(prefill.decode_ready, len(candidates))
        prefilling = prefill.workers_ready if isinstance(decision, Remote) else decoding
        decode_s = self.predictor.output_tokens * self.predictor.tpot_line[1]
        work_s = max(prefill_s / max(1, prefilling), decode_s / decoding)  # the pools work at the same time
        shares.count(request.tenant, work_s, now, 2 * burst_s)
        return PlacementDecision(decision, lead_s)

    def _admitted(
        self, request: RequestInfo, candidates: Sequence[Candidate], prefill: PrefillView, admission: bool
    ) -> PlacementDecision:
        slo = self.slo_of(request, prefill)
        decision = place(request, candidates, prefill, self.routing, self.choose, self.predictor, slo)
        if not admission:
            return PlacementDecision(decision)
        late_s = LATE_OBJECTIVES * self.slo.ttft_s
        return admit(decision, request, candidates, prefill, slo, self.predictor, late_s)

    def pair(
        self, request: RequestInfo, candidates: Sequence[Candidate], links: Mapping[str, Link], now: float
    ) -> Candidate | None:
        """The decode worker for a prompt whose prefill begins; None if there is none. `links`: from the worker that
        prefills it to each candidate; none where all workers are in one place."""
        if not (links and candidates):
            return self.choose(request, candidates) if candidates else None
        self.predictor.links.begin(now)
        return pair(request, candidates, links, self.choose, self.predictor, self.slo_of(request))

    def recall(self, request: RequestInfo, candidates: Sequence[Candidate], prefill: PrefillView) -> Local | None:
        """The decode worker that should prefill a queued request now; None if it should wait on.

        `prefill.queue` is the part of the queue ahead of it. The request is placed as if it had just arrived behind
        that part, but it moves only for a gain.
        """
        waiting = msgspec.structs.replace(prefill, queued=True)
        slo = self.slo_of(request, waiting)
        decision = place(request, candidates, waiting, self.routing, self.choose, self.predictor, slo)
        return decision if isinstance(decision, Local) else None

    def recalled(
        self, queued: Iterable[tuple[Job, Waiting]], depth: QueueDepth, workers_ready: int, others: float = 0.0
    ) -> list[tuple[Job, Local, Candidate]]:
        """The queued jobs that a decode worker should prefill now, in the order of the queue.

        Each comes with that worker's load after the earlier jobs of the result have gone there. `others` is the ratio
        of other routers' queued tokens to this router's. They are taken to be spread evenly over the queue, and the
        other routers to recall in the same proportion.
        """
        if self.routing.remote_prefill_min_tokens is not None:
            return []
        ahead, found, loads = 0, [], dict[str, RecalledLoad]()
        for job, waiting in islice(queued, MAX_RECALL_JOBS):
            ahead += int(others * waiting.uncached_tokens)
            seen = [_with_load(c, loads[c.worker_id]) if c.worker_id in loads else c for c in waiting.candidates]
            before = QueueDepth(depth.requests, ahead, depth.claimed)
            view = PrefillView(workers_ready, before, waiting.cached_at_prefill, adapter_tokens=waiting.adapter_tokens)
            local = self.recall(waiting.request, seen, view)
            if local is None:
                ahead += waiting.uncached_tokens
                continue
            chosen = next(candidate for candidate in seen if candidate.worker_id == local.worker_id)
            found.append((job, local, chosen))
            load = loads.get(chosen.worker_id, RecalledLoad())
            loads[chosen.worker_id] = load.plus(waiting.request, chosen, 1 + others)
        return found

    def slo_of(self, request: RequestInfo, prefill: PrefillView | None = None) -> SLOConfig:
        """The fleet's objectives with the TTFT objective that the request has of its own. A tighter TPOT objective that
        many of the latest requests bring keeps prompts off those that decode. Where prompts wait for that, the others
        pay for it: so it counts while `prefill` has room, or if all bring one."""
        own_s, tpot_s = request.ttft_slo_s, self._tpot.of_all_s
        if prefill is not None and prefill.queue is not None and self._tpot.seconds < tpot_s:
            backlog_s = self.predictor.backlog_s(prefill.queue, prefill.workers_ready)
            tpot_s = self._tpot.seconds if backlog_s <= ROOM_SHARE * self.slo.ttft_s else tpot_s
        if own_s is None and tpot_s == self.slo.tpot_s:
            return self.slo
        return msgspec.structs.replace(self.slo, ttft_s=own_s or self.slo.ttft_s, tpot_s=tpot_s)

    def delay_s(self, request: RequestInfo, uncached_tokens: int, later_s: float = 0.0) -> float:
        """Seconds between a job's arrival and its score in the prefill queue. `later_s`: as it was placed."""
        compute_s = self.predictor.prefill_s(uncached_tokens)
        later_s += self._patience_s(request)
        return later_s + delay_s(compute_s, QUEUE_WEIGHT, self.slo.ttft_s, request.priority)

    def _patience_s(self, request: RequestInfo) -> float:
        """By how much a request's objective lets it wait longer than others: so the queue is in order of deadlines."""
        return 0.0 if request.ttft_slo_s is None else request.ttft_slo_s - self.slo.ttft_s

    def engine_delay_s(self, request: RequestInfo, compute_tokens: int = 0, later_s: float = 0.0) -> float:
        """Seconds between a request's arrival and its place among the requests that wait in its decode engine.

        The engine has `compute_tokens` of the prompt to compute; 0 if the KV comes from a prefill worker. Requests wait
        there only when the engine is overloaded. Then a cached prompt must not wait behind others: it would lose its
        blocks to them and have to be computed too, and the engine would stay overloaded.
        """
        ttft_s = self.slo.ttft_s
        compute_s = self.predictor.prefill_s(compute_tokens) if compute_tokens else 0.0
        most = LATE_OBJECTIVES * ttft_s / ENGINE_WEIGHT
        later_s += self._patience_s(request) if compute_tokens else 0.0
        return later_s + delay_s(min(compute_s, most), ENGINE_WEIGHT, ttft_s, request.priority)


def admit(
    decision: Decision,
    request: RequestInfo,
    candidates: Sequence[Candidate],
    prefill: PrefillView,
    slo: SLOConfig,
    predictor: Predictor,
    late_s: float,
) -> PlacementDecision:
    """Whether a placed request may start now, by its predicted TTFT. As configured, one that would be late is rejected
    with the time by which it exceeds its bound as `Retry-After`, or goes `late_s` behind those that can be in time.

    The bound is the TTFT objective. As in vLLM a lower priority number is more important. Each step below 0 adds the
    objective to the bound once more, and each step above 0 takes a quarter off the bound, so that unimportant requests
    are refused first.
    """
    if slo.admission == "off" or isinstance(decision, Reject):
        return PlacementDecision(decision)
    ttft_s = predicted_ttft_s(decision, request, candidates, prefill, predictor)
    bound_s = slo.ttft_s * (1.0 - request.priority if request.priority <= 0 else 0.75**request.priority)
    if ttft_s <= bound_s:
        return PlacementDecision(decision)
    if slo.admission == "queue":
        return PlacementDecision(decision, late_s)
    return PlacementDecision(Reject("slo_ttft", min(MAX_RETRY_S, max(MIN_RETRY_S, ttft_s - bound_s))))


def latest_tpot(slo: SLOConfig, predictor: Predictor) -> LatestObjective:
    """For those who decode beside each other, and for the split. A sequence that decodes alone must meet it."""
    return LatestObjective(slo.tpot_s, TPOT_BROUGHT_BY, lambda: sum(predictor.tpot_line) / ITL_MARGIN)


def _is_idle(candidates: Sequence[Candidate], queue: QueueDepth | None) -> bool:
    """Whether nobody has a request anywhere: who could begin at once, and spends longer being handed over, waits for
    nothing."""
    queued = queue is not None and queue.requests + queue.claimed > 0
    return not queued and not any(candidate.running or candidate.waiting for candidate in candidates)


def _with_load(candidate: Candidate, load: RecalledLoad) -> Candidate:
    return msgspec.structs.replace(
        candidate,
        blocks_free=max(0, candidate.blocks_free - int(load.blocks)),
        waiting=candidate.waiting + int(load.requests),
        placed_tokens=candidate.placed_tokens + int(load.tokens),
    )


def haste(own_ttft_s: float | None, slo: SLOConfig) -> float:
    """The fleet's TTFT objective over a request's own, at most 1.

    A prompt that may wait for k times as long goes behind the others in the queue, and is in time where one of 1/k of
    its length would be. So it counts as short in the spread of prefill times, by which queues are judged; its work is
    the same. One with a tighter objective than the fleet's counts no more than others: clients name theirs.
    """
    return 1.0 if own_ttft_s is None else min(1.0, slo.ttft_s / own_ttft_s)


def delay_s(
    compute_s: float,
    weight: float,
    ttft_slo_s: float,
    priority: int = 0,
) -> float:
    """Seconds between a job's arrival and its score in the queue. A negative delay puts it before its arrival.

    The delay is `weight * compute_s`, where `compute_s` is the job's prefill time. Weight 0 is first come, first
    served; a large weight is shortest job first, which minimises the mean wait (W. E. Smith, "Various optimizers for
    single-stage production", 1956). Arrival plus a fixed delay is J. R. Jackson's dynamic priority ("Some problems in
    queueing with dynamic priorities", 1960): the scores of new jobs grow with time, so no job starves.

    Each step of `priority`, up to `MAX_STEPS`, adds one TTFT objective; lower numbers are more important, as in vLLM.
    """
    steps = max(-MAX_STEPS, min(MAX_STEPS, priority)) if priority else 0
    return weight * compute_s + steps * ttft_slo_s
