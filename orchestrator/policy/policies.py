"""The policies that a configuration names, together: one request's placement, admission and place in the queue.

The router and the simulator decide through this one class, so that what is simulated is what serves.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from orchestrator.config.settings import Config
from orchestrator.policy.admission import admit
from orchestrator.policy.candidate import Candidate, DecodeChoice
from orchestrator.policy.placement import Local, PrefillView, Reject, Remote, place
from orchestrator.policy.predict import Predictor
from orchestrator.types import RequestInfo

LATE_OBJECTIVES = 5.0  # how many TTFT objectives behind those still in time a hopeless job goes
MAX_STEPS = 10  # of priority: clients name it, and nobody may pass everybody for ever


class Ruling(msgspec.Struct, frozen=True):
    """`late`: it is predicted to miss its objective wherever it goes, and is queued behind those that can meet it."""

    decision: Local | Remote | Reject
    late: bool = False


class Policies:
    """`choose` and `predictor` are shared with who feeds them: measured times, and the output lengths of what ended."""

    def __init__(self, config: Config, choose: DecodeChoice, predictor: Predictor) -> None:
        self.routing, self.slo, self._queue = config.routing, config.slo, config.queue
        self.choose, self.predictor = choose, predictor

    def decide(
        self, request: RequestInfo, candidates: Sequence[Candidate], prefill: PrefillView, admission: bool = True
    ) -> Ruling:
        """Where a request goes. Without `admission` (it was accepted before) the objectives neither refuse nor defer
        it."""
        decision = place(request, candidates, prefill, self.routing, self.choose, self.predictor, self.slo)
        if not admission or self.slo.admission == "off":
            return Ruling(decision)
        admitted = admit(decision, request, candidates, prefill, self.slo, self.predictor)
        if isinstance(admitted, Reject):
            return Ruling(admitted)
        return Ruling(admitted.decision, admitted.deferred)

    def recall(self, request: RequestInfo, candidates: Sequence[Candidate], prefill: PrefillView) -> Local | None:
        """Where a request that waits in the queue should rather be prefilled now; None: it waits on.

        `prefill.queue` is what is ahead of it. It is placed as if it had just arrived there, but moves only for a gain.
        """
        waiting = msgspec.structs.replace(prefill, queued=True)
        decision = place(request, candidates, waiting, self.routing, self.choose, self.predictor, self.slo)
        return decision if isinstance(decision, Local) else None

    def delay_s(self, request: RequestInfo, uncached_tokens: int, late: bool = False) -> float:
        """Seconds behind its arrival that a job's place in the prefill queue is."""
        compute_s = self.predictor.prefill_s(uncached_tokens)
        return delay_s(compute_s, self._queue.weight, self.slo.ttft_s, request.priority, late)


def delay_s(
    compute_s: float,
    weight: float,
    ttft_slo_s: float,
    priority: int = 0,
    late: bool = False,
) -> float:
    """How many seconds behind its arrival a job's place in the queue is; before it where negative.

    `weight * compute_s`, where `compute_s` is what its prefill takes. Weight 0 is first come, first served; a large one
    is shortest job first, which minimises the mean wait (W. E. Smith, "Various optimizers for single-stage production",
    1956).
    Arrival plus a fixed urgency is J. R. Jackson's dynamic priority ("Some problems in queueing with dynamic
    priorities", 1960): newcomers' places grow with time, so none waits for ever behind them.

    Each step of `priority` is worth one TTFT objective, at most `MAX_STEPS` of them; lower numbers are more important,
    as in vLLM. `late` marks a job that was predicted to miss its objective whatever is done.
    """
    steps = max(-MAX_STEPS, min(MAX_STEPS, priority))
    return weight * compute_s + steps * ttft_slo_s + (LATE_OBJECTIVES * ttft_slo_s if late else 0.0)
