"""Whether a placed request may start now, by its predicted TTFT, the TTFT objective and its priority.

Runs after `placement`, on its decision. As configured, a request that would be late is rejected with 429 and a
predicted `Retry-After`, or deferred behind the requests that can still be in time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Union

import msgspec

from orchestrator.config.settings import SLOConfig
from orchestrator.policy.candidate import Candidate, RequestInfo
from orchestrator.policy.placement import Decision, Local, PrefillView, Reject, Remote
from orchestrator.policy.predict.predictor import Predictor

MIN_RETRY_S, MAX_RETRY_S = 1.0, 60.0


class Admitted(msgspec.Struct, frozen=True):
    """`deferred`: the request would be late and goes behind those in time (`LATE_OBJECTIVES` of `policies`)."""

    decision: Local | Remote
    predicted_ttft_s: float
    deferred: bool = False


Admission = Union[Admitted, Reject]


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
        return predictor.remote_ttft_s(compute, request.prompt_tokens, prefill.queue, prefill.workers_ready)
    for candidate in candidates:
        if candidate.worker_id == decision.worker_id:
            return predictor.local_ttft_s((candidate,), request.prompt_tokens)[0]
    raise ValueError(f"placed on {decision.worker_id}, which is no candidate")


def admit(
    decision: Decision,
    request: RequestInfo,
    candidates: Sequence[Candidate],
    prefill: PrefillView,
    slo: SLOConfig,
    predictor: Predictor,
) -> Admission:
    """Admit, defer or reject. `Retry-After` is the time by which the predicted TTFT exceeds its bound, 1 to 60 s.

    The bound is the TTFT objective. As in vLLM a lower priority number is more important. Each step below 0 adds the
    objective to the bound once more, and each step above 0 takes a quarter off the bound, so that unimportant requests
    are refused first.
    """
    if isinstance(decision, Reject):
        return decision
    ttft_s = predicted_ttft_s(decision, request, candidates, prefill, predictor)
    if slo.admission == "off":
        return Admitted(decision, ttft_s)
    bound_s = slo.ttft_s * _slack_factor(request.priority)
    if ttft_s <= bound_s:
        return Admitted(decision, ttft_s)
    if slo.admission == "queue":
        return Admitted(decision, ttft_s, deferred=True)
    return Reject("slo_ttft", min(MAX_RETRY_S, max(MIN_RETRY_S, ttft_s - bound_s)))


def _slack_factor(priority: int) -> float:
    return 1.0 - priority if priority <= 0 else 0.75**priority
