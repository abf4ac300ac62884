"""Where a request is prefilled: at its decode worker (local), by the prefill pool (remote), or not at all.

Every decision has a reason, a short word by which metrics count decisions. The decode choice picks the decode worker:
at once for a local request, and when a prefill worker has claimed the job for a remote one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Union

import msgspec

from orchestrator.config.settings import RoutingConfig, SLOConfig
from orchestrator.policy.decode_choice import Candidate, DecodeChoice, RequestInfo, blocks_for
from orchestrator.policy.predict.adapters import DEAREST_LOAD
from orchestrator.policy.predict.predictor import Predictor
from orchestrator.types import QueueDepth

# The default claim timeout in TTFT objectives. A job that waits in the queue is late alone, and goes behind those that
# can be in time; prefilled locally it delays all sequences that decode there. So a queue far longer than the objective
# is better than none, and only a wait that no user bears ends it.
CLAIM_TIMEOUT_IN_OBJECTIVES = 15.0
MIN_CLAIM_TIMEOUT_S = 15.0
MAX_WAITING = 128  # a decode engine with this many waiting requests is full
RETRY_AFTER_S = 1.0  # of a rejection without a predicted time
# The decode choice picks among the workers whose local cost exceeds the lowest by at most this factor, or by one ITL.
TTFT_TOLERANCE = 1.1
# The same for lateness, by which workers are compared when the request cannot be prefilled remotely.
LATENESS_TOLERANCE = 1.1
# Of the TTFT objective, for a predicted mean: waits are about exponential, and 95% of those are below three means.
SURE_SHARE = 1 / 3
ITL_MARGIN = 0.9  # of the TPOT objective: predictions are means, but nearly all requests must meet the objective
# Of a TTFT objective: the price of all the slack that the running sequences of a worker have.
SLACK_PRICE = 0.02
# Of the bound on the ITL: the least slack of a worker without sequences, whose measured ITL may be that of a bad time.
EMPTY_SLACK = 0.1
# Of the TTFT objective: while a job waits for less in the prefill queue, the prefill workers have room.
ROOM_SHARE = 0.1


class PrefillView(msgspec.Struct, frozen=True):
    """The prefill pool as the router sees it. `queue` is None while the queue is unavailable."""

    workers_ready: int
    queue: QueueDepth | None
    cached_tokens: int = 0  # this request's best prefix-cache hit on a prefill worker
    queued: bool = False  # the request is in the queue already; `queue` is the part of the queue ahead of it
    blocked: str | None = None  # why this request cannot go into the queue, whatever the pool can take
    adapter_tokens: int = 0  # what it spends on its LoRA adapter there, as prompt tokens
    decode_ready: int = 0  # decode workers; of many, the candidates are a few


class Local(msgspec.Struct, tag="local", frozen=True):
    worker_id: str
    reason: str


class Remote(msgspec.Struct, tag="remote", frozen=True):
    reason: str
    ttft_s: float | None = None  # predicted; None if no times were compared


class Reject(msgspec.Struct, tag="reject", frozen=True):
    """The frontend answers with 429 or 503, and `Retry-After`."""

    reason: str
    retry_after_s: float
    no_fallback: bool = False  # it needs remote prefill, which cannot be had now: waiting for room here does not help


Decision = Union[Local, Remote, Reject]


def place(
    request: RequestInfo,
    candidates: Sequence[Candidate],
    prefill: PrefillView,
    routing: RoutingConfig,
    choose: DecodeChoice,
    predictor: Predictor,
    slo: SLOConfig = SLOConfig(),
) -> Decision:
    """Place a request that has just arrived, or whose earlier attempt failed.

    The decision compares predicted times, or with `routing.remote_prefill_min_tokens` the uncached prompt length.
    Reasons for local: `short_prompt`, `cost`, `no_prefill_worker`, `queue_unavailable`, `queue_full`, or the request's
    own `local_only`. For remote: `long_prompt`, `cost`, or `decode_full` when no decode worker has room for a local
    prefill. For reject: `decode_full`, `no_decode_worker`.

    With `routing.fallback: refuse` the three reasons that are the pool's, and `prefill.blocked`, are reasons for reject
    where a prefill worker would get the request if one were idle.
    """
    if not candidates:
        return Reject("no_decode_worker", RETRY_AFTER_S)
    open_ones = [c for c in candidates if c.waiting < MAX_WAITING or not is_full(request, c)]
    min_tokens = routing.remote_prefill_min_tokens
    if request.local_only is not None and min_tokens is not None:
        return _local(request, open_ones, choose, request.local_only)
    blocker = request.local_only or prefill.blocked or _queue_closed_reason(prefill, routing, predictor, slo)
    refusal = blocker if routing.fallback == "refuse" and request.local_only is None else None
    if refusal is not None:  # decided as if a prefill worker were idle
        blocker, prefill = None, PrefillView(1, QueueDepth(0, 0, 0), prefill.cached_tokens)
    if min_tokens is not None:
        decision = _by_threshold(request, open_ones, blocker, min_tokens, choose)
    else:
        decision = _by_cost(request, open_ones, prefill, blocker, routing, choose, predictor, slo)
    if refusal is None or not isinstance(decision, Remote):
        return decision
    if decision.reason == "decode_full":
        return Reject("decode_full", RETRY_AFTER_S)
    return Reject(refusal, RETRY_AFTER_S, no_fallback=True)


def reject_all(
    candidates: Sequence[Candidate],
    prefill: PrefillView,
    routing: RoutingConfig,
    predictor: Predictor,
    slo: SLOConfig,
) -> Reject | None:
    """A rejection if the fleet can take no request now, however short; else None.

    The server asks before a response begins.
    """
    if not candidates:
        return Reject("no_decode_worker", RETRY_AFTER_S)
    open_to_some = any(c.waiting < MAX_WAITING or (c.blocks_free > 0 and not _is_batch_full(c)) for c in candidates)
    if open_to_some or _queue_closed_reason(prefill, routing, predictor, slo) is None:
        return None
    return Reject("decode_full", RETRY_AFTER_S)


def predicted_ttft_s(
    decision: Local | Remote,
    request: RequestInfo,
    candidates: Sequence[Candidate],
    prefill: PrefillView,
    predictor: Predictor,
) -> float:
    """The predicted TTFT in seconds from now of a request that is placed as decided.

    Raises ValueError if a local decision names a worker that is not among the candidates.
    """
    if isinstance(decision, Remote):
        if decision.ttft_s is not None:
            return decision.ttft_s
        if prefill.queue is None:
            return predictor.prefill_s(request.prompt_tokens)
        compute = max(0, request.prompt_tokens - prefill.cached_tokens)
        return sum(predictor.remote_s(compute, request.prompt_tokens, prefill.queue, prefill.workers_ready))
    for candidate in candidates:
        if candidate.worker_id == decision.worker_id:
            return predictor.local_ttft_s((candidate,), request.prompt_tokens)[0]
    raise ValueError(f"placed on {decision.worker_id}, which is no candidate")


def claim_timeout_s(routing: RoutingConfig, slo: SLOConfig, own_ttft_s: float | None = None) -> float:
    """Seconds after which a job that no worker has claimed leaves the queue. A queue with longer waits is full."""
    if routing.claim_timeout_s is not None:
        return routing.claim_timeout_s
    return max(MIN_CLAIM_TIMEOUT_S, CLAIM_TIMEOUT_IN_OBJECTIVES * (own_ttft_s or slo.ttft_s))


def is_full(request: RequestInfo, candidate: Candidate) -> bool:
    """Whether `MAX_WAITING` requests wait there, and it lacks blocks or a place for this one."""
    return candidate.waiting >= MAX_WAITING and (
        blocks_for(request.prompt_tokens, candidate.block_size) > candidate.blocks_free or _is_batch_full(candidate)
    )


def _is_batch_full(candidate: Candidate) -> bool:
    """Whether its batch (`max_num_seqs`) and its waiting places are all taken."""
    return candidate.running + candidate.waiting >= candidate.max_num_seqs + MAX_WAITING


def uncached_tokens(request: RequestInfo, candidate: Candidate) -> int:
    tokens = request.prompt_tokens - candidate.cached_tokens
    return tokens if tokens > 0 else 0


def _by_threshold(
    request: RequestInfo,
    open_ones: Sequence[Candidate],
    blocker: str | None,
    min_tokens: int,
    choose: DecodeChoice,
) -> Decision:
    # The same prompt can be short on a worker that has its prefix cached, and long on another.
    near = [c for c in open_ones if uncached_tokens(request, c) < min_tokens]
    if near and (chosen := choose(request, near)) is not None:
        return Local(chosen.worker_id, "short_prompt")
    if blocker is None:
        short = request.prompt_tokens < min_tokens
        return Remote("decode_full" if short else "long_prompt")
    return _local(request, open_ones, choose, blocker)


def _by_cost(
    request: RequestInfo,
    open_ones: Sequence[Candidate],
    prefill: PrefillView,
    blocker: str | None,
    routing: RoutingConfig,
    choose: DecodeChoice,
    predictor: Predictor,
    slo: SLOConfig,
) -> Decision:
    """Remote if its predicted TTFT is below the lowest local cost by more than the error of the transfer time.

    The cost of a local prefill is its predicted TTFT plus the harm to the sequences that decode there, in two terms.
    The prefill delays each of them. While the prefill workers have room, nothing is gained by that: a second of delay
    costs 2 v, where v is the sequence's ITL over its bound, because so much does the square of v grow (`_lateness`).
    As the queue grows to `ROOM_SHARE` this term falls to nothing, since both pools are then needed. What remains is
    the slack that the prefill uses up: the time by which a sequence's remaining tokens could be later without missing
    the TPOT objective. The used share of it, summed over the sequences, costs `SLACK_PRICE` TTFT objectives. Where
    answers are short few sequences are there at once, and those that come during the prefill are more: their slack
    counts then.

    A worker whose running sequences would exceed `ITL_MARGIN` of the TPOT objective is excluded. Their ITL is the
    measured one, which a burst outruns. If a remote prefill is nearly sure to be in time (`SURE_SHARE`), the present
    number of sequences counts too, because then nothing is gained by the risk.

    If the request cannot be prefilled remotely, `_lateness` ranks the workers instead.
    """
    if not open_ones:
        return Remote("decode_full") if blocker is None else Reject("decode_full", RETRY_AFTER_S)
    prompt_tokens = request.prompt_tokens
    if blocker is not None or prefill.queue is None:
        ttft = predictor.local_ttft_s(open_ones, prompt_tokens)
        late = _lateness(open_ones, ttft, prompt_tokens, predictor, slo)
        bound = min(late) * LATENESS_TOLERANCE
        near = [candidate for candidate, lateness in zip(open_ones, late, strict=True) if lateness <= bound]
        return _local(request, near, choose, blocker or "cost")
    compute = max(0, prompt_tokens - prefill.cached_tokens)
    wait_s, rest_s = predictor.remote_s(compute, prompt_tokens, prefill.queue, prefill.workers_ready)
    needed_tokens = 0  # what no decode worker saves, wherever the prompt is computed
    if request.adapter:
        least_tokens = min([candidate.adapter_tokens for candidate in open_ones])
        # Where it waits for a slot everywhere, it better has its first token by then.
        needed_tokens = least_tokens if least_tokens <= DEAREST_LOAD * predictor.adapter_load_tokens else 0
    fixed_s, s_per_token = predictor.prefill_line
    ttft_s = wait_s + rest_s + s_per_token * (prefill.adapter_tokens + needed_tokens)
    # The gain must exceed the error of the transfer time: on a tie a new request is local, and a queued one waits on.
    error_s = predictor.transfer_error_s(prompt_tokens)
    remote_s = ttft_s - error_s if prefill.queued else ttft_s + error_s
    by_sequences = remote_s <= SURE_SHARE * slo.ttft_s
    sooner = predictor.local_s(open_ones, prompt_tokens, by_sequences, most_s=remote_s)
    if not sooner:
        return Remote("cost", ttft_s)
    ahead_tokens = predictor.ahead_tokens
    itl_bound_s, price_s = ITL_MARGIN * slo.tpot_s, SLACK_PRICE * slo.ttft_s
    delay_price = 2 * max(0.0, 1 - wait_s / (ROOM_SHARE * slo.ttft_s)) / itl_bound_s
    empty_slack_s = EMPTY_SLACK * itl_bound_s * ahead_tokens
    come_per_s = predictor.arrivals_per_s / 2  # what comes during a prefill is delayed by half of it in the mean
    cost: list[float] = []
    # A plain loop over locals, as in `_lateness`.
    for candidate, local_s, itl_s in sooner:
        running = candidate.running
        if running and itl_s >= itl_bound_s:
            cost.append(math.inf)
            continue
        tokens = prompt_tokens - candidate.cached_tokens
        tokens = candidate.adapter_tokens - needed_tokens + (tokens if tokens > 0 else 0)
        delay_s = fixed_s + s_per_token * tokens
        coming = come_per_s * delay_s
        delayed = running if running > coming else coming
        slack_s, least_s = (itl_bound_s - itl_s) * ahead_tokens, 1e-3 if running else empty_slack_s
        used = delayed * price_s / (slack_s if slack_s > least_s else least_s)
        cost.append(local_s + delay_s * (running * delay_price * itl_s + used))
    least = min(cost)
    if least > remote_s:
        return Remote("cost", ttft_s)
    bound = min(remote_s, max(least * TTFT_TOLERANCE, least + predictor.itl_s(open_ones[0].worker_id)))
    near = [candidate for (candidate, _, _), cost_s in zip(sooner, cost, strict=True) if cost_s <= bound]
    return _local(request, near, choose, "cost")


def _lateness(
    candidates: Sequence[Candidate], ttft_s: Sequence[float], prompt_tokens: int, predictor: Predictor, slo: SLOConfig
) -> list[float]:
    """For each worker, how much the total lateness grows if the request is prefilled there. No unit.

    Lateness is the square of (predicted time / objective): times vary, and the nearer their mean is to the objective,
    the more requests miss it when the mean grows a little. The growth is the lateness of the request itself, in TTFT
    and TPOT, and what the sequences that decode there lose by one more sequence and by its prefill. A prefill also
    delays the requests that arrive during it, so a worker with few sequences is charged as if it had the mean number.

    The TTFT includes the wait for room in the batch and in memory: the share of the running requests, or of the used
    blocks, that must be freed first, times the mean duration of a request. The memory needed includes the tokens that
    the sequences there will still generate.
    """
    # Plain loops over locals: this runs for every request, and over every worker of a small fleet. When a value grows
    # from `v` by `x`, its square grows by x * (2 v + x).
    ahead_tokens, tpot_slo_s, ttft_slo_s = predictor.ahead_tokens, slo.tpot_s, slo.ttft_s
    delay = predictor.s_per_token / ahead_tokens / tpot_slo_s  # growth of TPOT / objective by one prompt token
    fixed, each = predictor.tpot_line
    fixed, each, stay_s = fixed / tpot_slo_s, each / tpot_slo_s, 2 * ahead_tokens * tpot_slo_s
    own_tokens, count, sum_tpot, sum_running = prompt_tokens + 2 * ahead_tokens, len(candidates), 0.0, 0
    there = []
    for candidate in candidates:
        running = candidate.running
        sequences, pending = running + candidate.waiting, candidate.waiting_tokens
        tpot = fixed + each * sequences + delay * (pending + candidate.placed_tokens)
        sum_tpot += tpot
        sum_running += running
        there.append((tpot, running, sequences, own_tokens + pending + sequences * ahead_tokens))
    mean_tpot, mean_running, found = sum_tpot / count, sum_running / count, []
    for candidate, own_ttft_s, (tpot, running, sequences, needed) in zip(candidates, ttft_s, there, strict=True):
        tokens, free = prompt_tokens - candidate.cached_tokens, candidate.blocks_free
        prompt = delay * tokens if tokens > 0 else 0.0
        lacking, excess = needed / candidate.block_size - free, sequences + 1 - candidate.max_num_seqs
        if lacking > 0 or excess > 0:
            must_end = max(lacking / max(1, candidate.blocks_total - free), excess / max(1, running))
            own_ttft_s += stay_s * tpot * must_end
        ttft, own = own_ttft_s / ttft_slo_s, tpot + each + prompt
        met = tpot if tpot > mean_tpot else mean_tpot
        among = (running if running > mean_running else mean_running) * prompt * (2 * met + prompt)
        found.append(ttft * ttft + own * own + running * each * (2 * tpot + each) + among)
    return found


def _queue_closed_reason(
    prefill: PrefillView, routing: RoutingConfig, predictor: Predictor, slo: SLOConfig
) -> str | None:
    """The reason why no job can be queued now, or None. The queue is full if a job would reach its claim deadline."""
    if prefill.workers_ready == 0:
        return "no_prefill_worker"
    if prefill.queue is None:
        return "queue_unavailable"
    full = predictor.backlog_s(prefill.queue, prefill.workers_ready) > claim_timeout_s(routing, slo)
    return "queue_full" if full else None


def _local(request: RequestInfo, open_ones: Sequence[Candidate], choose: DecodeChoice, reason: str) -> Decision:
    chosen = choose(request, open_ones)
    if chosen is None:
        return Reject("decode_full", RETRY_AFTER_S)
    return Local(chosen.worker_id, reason)
