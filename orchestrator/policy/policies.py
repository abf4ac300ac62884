"""The policies that a configuration names, together: one request's placement, admission and place in the queue.

The router and the simulator decide through this one class, so that what is simulated is what serves.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import TypeVar

import msgspec

from orchestrator.config.settings import Config
from orchestrator.policy.admission import admit
from orchestrator.policy.candidate import Candidate, DecodeChoice, blocks_for
from orchestrator.policy.placement import Local, PrefillView, Reject, Remote, place, uncached_tokens
from orchestrator.policy.predict import Predictor
from orchestrator.types import QueueDepth, RequestInfo

Job = TypeVar("Job")
LATE_OBJECTIVES = 5.0  # how many TTFT objectives behind those still in time a hopeless job goes
ENGINE_WEIGHT = 30.0  # seconds behind its arrival for each second of prompt: many, for why see `engine_delay_s`
MAX_STEPS = 10  # of priority: clients name it, and nobody may pass everybody for ever
# Between two looks at what waits in the queue: each takes passing advantages for lasting ones.
RECALL_S = 1.0
MAX_RECALL_LOOKS = 256  # at the head of the queue, at a time: what is behind has others to wait for


class Ruling(msgspec.Struct, frozen=True):
    """`late`: it is predicted to miss its objective wherever it goes, and is queued behind those that can meet it."""

    decision: Local | Remote | Reject
    late: bool = False


class Waiting(msgspec.Struct, frozen=True):
    """A request that waits in the queue, and what a placement of it would see now."""

    request: RequestInfo
    uncached_tokens: int
    candidates: Sequence[Candidate]
    cached_at_prefill: int  # tokens, on the prefill worker that has most


class Gone(msgspec.Struct, frozen=True):
    """What has been sent to a worker, which its load does not show yet."""

    requests: float = 0.0
    blocks: float = 0.0
    tokens: float = 0.0  # to compute there

    def and_of(self, request: RequestInfo, candidate: Candidate, times: float) -> Gone:
        """And of so many requests like this one."""
        blocks = blocks_for(request.prompt_tokens, candidate.block_size)
        tokens = uncached_tokens(request, candidate)
        return Gone(self.requests + times, self.blocks + times * blocks, self.tokens + times * tokens)


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

    def recalled(
        self, queued: Iterable[tuple[Job, Waiting]], depth: QueueDepth, workers_ready: int, others: float = 0.0
    ) -> list[tuple[Job, Local, Candidate]]:
        """Which of those that wait a decode worker would now serve sooner than those ahead of them let them be, in the
        order of the queue, each with that worker as it is once those before have gone there.

        `others`: for each token of these jobs, as many tokens of other routers' jobs lie before it. As many of them
        leave, as their routers find the same.
        """
        if self.routing.remote_prefill_min_tokens is not None:
            return []
        ahead, found, gone = 0, [], dict[str, Gone]()
        for job, waiting in islice(queued, MAX_RECALL_LOOKS):
            ahead += int(others * waiting.uncached_tokens)
            seen = [_after(gone[c.worker_id], c) if c.worker_id in gone else c for c in waiting.candidates]
            before = QueueDepth(depth.requests, ahead, depth.claimed)
            view = PrefillView(workers_ready, before, waiting.cached_at_prefill)
            local = self.recall(waiting.request, seen, view)
            if local is None:
                ahead += waiting.uncached_tokens
                continue
            chosen = next(candidate for candidate in seen if candidate.worker_id == local.worker_id)
            found.append((job, local, chosen))
            gone[chosen.worker_id] = gone.get(chosen.worker_id, Gone()).and_of(waiting.request, chosen, 1 + others)
        return found

    def delay_s(self, request: RequestInfo, uncached_tokens: int, late: bool = False) -> float:
        """Seconds behind its arrival that a job's place in the prefill queue is."""
        compute_s = self.predictor.prefill_s(uncached_tokens)
        return delay_s(compute_s, self._queue.weight, self.slo.ttft_s, request.priority, late)

    def engine_delay_s(self, request: RequestInfo, compute_tokens: int = 0, late: bool = False) -> float:
        """The same for the place among those that wait in the engine of its decode worker, where `compute_tokens` of
        its prompt are computed (none where its KV comes from elsewhere).

        What waits there waits because the engine is behind, and then a cached prompt must not wait behind others: it
        would lose its blocks to them and have to be computed as well, and the engine would stay behind.
        """
        ttft_s = self.slo.ttft_s
        compute_s = self.predictor.prefill_s(compute_tokens) if compute_tokens else 0.0
        most = LATE_OBJECTIVES * ttft_s / ENGINE_WEIGHT
        return delay_s(min(compute_s, most), ENGINE_WEIGHT, ttft_s, request.priority, late)


def _after(gone: Gone, candidate: Candidate) -> Candidate:
    return msgspec.structs.replace(
        candidate,
        blocks_free=max(0, candidate.blocks_free - int(gone.blocks)),
        waiting=candidate.waiting + int(gone.requests),
        placed_tokens=candidate.placed_tokens + int(gone.tokens),
    )


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
