"""Decides where a request is prefilled and which worker decodes it: gathers the views and asks the policies.

The connection between `router`, which carries placements out, and `policy`, which knows only its arguments. Sends
nothing and changes no request.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

import msgspec

from orchestrator.config.settings import Config
from orchestrator.fleet.queue_view import QueueView
from orchestrator.fleet.view import Fleet
from orchestrator.fleet.worker_view import WorkerView
from orchestrator.policy.decode_choice import (
    MAX_HOLDERS,
    PRIOR_BYTES_PER_S,
    Candidate,
    DecodeChoice,
    Holder,
    RequestInfo,
    choose_holder,
    load_s_per_token,
)
from orchestrator.policy.placement import RETRY_AFTER_S, Local, PrefillView, Reject, reject_all
from orchestrator.policy.policies import Policies, Waiting
from orchestrator.policy.prefix_index import Hits, PrefixIndex
from orchestrator.router.learning import Learning
from orchestrator.router.request import ActiveRequest, Placed
from orchestrator.types import PrefillJob, Role, WorkerLoad
from orchestrator.wire.messages import pack_frames

# As in `fleet.view`.
_PREFILL, _DECODE = Role.PREFILL, Role.DECODE
# Why an attempt that may be refused is not queued (again). After any other failure it is placed as if it were new.
NOT_QUEUED = frozenset({"claim_timeout", "queue_full", "queue_unavailable", "no_paired_worker"})
# Local whatever `routing.fallback` is: the policies prefer it, or no queue or prefill worker would ever take the job.
BETTER_LOCAL = frozenset({"recalled", "job_too_large", "prefill_refused"})


class Decider:
    def __init__(
        self,
        frontend_id: str,
        config: Config,
        fleet: Fleet,
        queue: QueueView,
        prefixes: PrefixIndex,
        choose: DecodeChoice,
        learning: Learning,
    ) -> None:
        self._frontend_id = frontend_id
        self._routing, self._slo, self._fetches = config.routing, config.slo, config.kv.fetch == "auto"
        self._fleet, self._queue, self._prefixes = fleet, queue, prefixes
        self._policies = Policies(config, choose, learning.predictor, learning.tpot)
        self._predictor, self._late = learning.predictor, learning.late
        self._decoded_until = -math.inf  # monotonic; a decode worker was ready so lately that another will be soon

    def fleet_rejection(self) -> Reject | None:
        """Why no request at all can be taken now; None if one can."""
        return reject_all(
            self._fleet.candidates().decode, self._prefill_pool(), self._routing, self._predictor, self._slo
        )

    def look(self, now: float) -> None:
        """Note whether a decode worker is ready. Call it several times in `routing.placement_timeout_s`. `now`:
        monotonic seconds."""
        if self._fleet.ready(_DECODE):
            self._decoded_until = now + self._routing.placement_timeout_s

    def is_temporary(self, rejected: Reject) -> bool:
        """Whether the rejection will pass by itself: an idle model's workers come back, the launcher gives a live
        worker the decode role, or it starts those again that were ready a moment ago."""
        able = (view.info.can_be(Role.DECODE) for view in self._fleet.workers.values())
        away = self._fleet.rest is not None and self._fleet.rest.away
        if rejected.reason != "no_decode_worker":
            return away and rejected.reason == "no_prefill_worker"
        return away or time.monotonic() < self._decoded_until or any(able)

    def recall_s(self) -> float:
        """Ask for the workers of an idle model, if it is one. For how long a request may wait for them; else 0."""
        rest = self._fleet.rest
        return rest.cold_start_s if rest is not None and rest.recall() else 0.0

    def decide(self, active: ActiveRequest) -> Placed | Reject:
        """Where this attempt goes. A retry is never refused for its predicted latency: it was accepted once."""
        if not self._fleet.ready(_DECODE):  # a short cut, since all waiting requests ask again and again
            return Reject("no_decode_worker", RETRY_AFTER_S)
        info, blocked = self._restrictions(active)
        hits = self._prefixes.look_up(active.parsed.prefix_keys)
        found = self._fleet.candidates(active.avoid, hits, adapter=info.adapter)
        cached_at_prefill, candidates = found.cached_at_prefill, self._priced(info.adapter, found.decode)
        saved, adapter_tokens = self._adapter_at_prefill(info.adapter)
        pool = self._prefill_pool(found.most_at_prefill, blocked, adapter_tokens)
        new, counted = active.attempt == 1, active.placed is not None
        placement = self._policies.decide(info, candidates, pool, time.monotonic(), admission=new, counted=counted)
        decision = placement.decision
        if isinstance(decision, Reject):
            return decision
        uncached_tokens = max(1, info.prompt_tokens - pool.cached_tokens)
        at_decode = max(1, info.prompt_tokens - max([candidate.cached_tokens for candidate in candidates]))
        if isinstance(decision, Local):
            chosen, cached_tokens = decision.worker_id, hits.blocks(decision.worker_id) * self._fleet.block_size
            return Placed(
                decision.reason,
                max(1, info.prompt_tokens - cached_tokens),
                chosen,
                cached_tokens,
                at_prefill_tokens=uncached_tokens,
                at_decode_tokens=at_decode,
                delay_s=self._policies.engine_delay_s(info, info.prompt_tokens - cached_tokens, placement.later_s),
                adapter_tokens=sum([one.adapter_tokens for one in candidates if one.worker_id == chosen]),
            )
        backlog_s = self._predictor.backlog_s(pool.queue, pool.workers_ready) if pool.queue is not None else 0.0
        cached = dict(cached_at_prefill)
        if saved:
            cached |= {PrefillJob.ADAPTER + name: tokens for name, tokens in saved.items()}
        if (lender := next(self._lenders(active, hits), None)) is not None:
            cached[PrefillJob.LENT] = lender[2]
        job = self._job(active, uncached_tokens, cached, placement.later_s)
        return Placed(
            decision.reason,
            uncached_tokens,
            job=job,
            backlog_s=backlog_s,
            at_prefill_tokens=uncached_tokens,
            at_decode_tokens=at_decode,
            delay_s=self._policies.engine_delay_s(info),
        )

    def _restrictions(self, active: ActiveRequest) -> tuple[RequestInfo, str | None]:
        """The request as it may be placed now, and why it may not be queued.

        A retry is prefilled locally. With `routing.fallback: refuse` that is so only once the client has tokens, and
        while the request may have crashed an engine: its trial is on one worker.
        """
        info, reason = active.parsed.info, active.local_reason
        if reason is None or info.local_only is not None:
            return info, None
        may_refuse = self._routing.fallback == "refuse" and not active.answer.tokens and not active.crashes
        if may_refuse and reason not in BETTER_LOCAL:
            return info, reason if reason in NOT_QUEUED else None
        return msgspec.structs.replace(info, local_only=reason), None

    def recalled(self, queued: Iterable[ActiveRequest]) -> list[ActiveRequest]:
        """The queued requests of this frontend that a decode worker would now serve sooner."""
        depth = self._queue.depth
        jobs = [(active.placed.job, active) for active in queued if active.placed and active.placed.job]
        if depth is None:
            return []
        jobs.sort(key=lambda pair: pair[0].arrived_at + pair[0].delay_s)
        own_tokens = sum(job.uncached_tokens for job, _ in jobs)
        # Assumes that the other frontends' jobs are spread evenly among this frontend's, in proportion to its tokens.
        others = max(0.0, depth.tokens / own_tokens - 1) if own_tokens else 0.0
        waiting = ((active, self._waiting(active, job.uncached_tokens)) for job, active in jobs)
        found = self._policies.recalled(waiting, depth, self._fleet.ready(_PREFILL), others)
        return [active for active, _, _ in found]

    def _waiting(self, active: ActiveRequest, uncached_tokens: int) -> Waiting:
        info, hits = active.parsed.info, self._prefixes.look_up(active.parsed.prefix_keys)
        found = self._fleet.candidates(active.avoid, hits, adapter=info.adapter)
        cached_tokens, candidates = found.most_at_prefill, self._priced(info.adapter, found.decode)
        _, adapter_tokens = self._adapter_at_prefill(info.adapter)
        return Waiting(info, uncached_tokens, candidates, cached_tokens, adapter_tokens)

    def bind(self, active: ActiveRequest, domain: str) -> Candidate | None:
        """The decode worker for a request whose prefill begins now on a prefill worker of this domain, by the latest
        loads and prefix hits. None if the domain has no decode worker to which KV comes from there."""
        parsed, near, now = active.parsed, active.prefill_worker or "", time.monotonic()
        late = self._late.resting(near, now)
        hits = self._prefixes.look_up(parsed.prefix_keys)
        adapter = parsed.info.adapter
        # A decode worker that still computes this prompt, because it was a prefill worker, would refuse the request.
        seen = self._fleet.candidates((*active.avoid, near, *late), hits, domain, adapter, near).decode
        if late and self._routing.fallback != "refuse":  # then even the worst pair is better than none
            seen = [candidate for candidate in seen if candidate.worker_id not in late]
        candidates, links = self._priced(adapter, seen), self._fleet.places.links(near, seen)
        return self._policies.pair(parsed.info, candidates, links, now)

    def holder(self, active: ActiveRequest, asker: str, cached_tokens: int) -> Holder | None:
        """The worker from whose cache `asker` fetches the beginning of the prompt; None: it computes all.
        `cached_tokens`: what it has of it itself, if it is not among the few workers that a job names."""
        to = self._fleet.workers.get(asker)
        if not self._fetches or to is None or not to.info.lends:
            return None
        hits = self._prefixes.look_up(active.parsed.prefix_keys)
        cached_tokens = max(cached_tokens, hits.blocks(asker) * self._fleet.block_size)
        links, places, rests_from = self._predictor.links, self._fleet.places, to.load.rests_from if to.load else ()
        holders = [
            Holder(
                worker_id=view.info.id,
                tokens=tokens,
                requests=view.candidate.running + view.candidate.waiting,
                step_s=load.step_ms / 1e3,
                link_extra_s=links.extra_s(places.link(view.info.id, asker), max(0, tokens - cached_tokens)),
                host_tokens=self._host_tokens(view, active.parsed.prefix_keys, tokens),
                load_s_per_token=load_s_per_token(
                    view.info.kv_bytes_per_token, load.kv.host_loaded_bytes, load.kv.host_load_s, view.info.kv.tp_size
                ),
            )
            for view, load, tokens in self._lenders(active, hits)
            if view is not to and view.info.domain == to.info.domain and view.info.kv.engine_id not in rests_from
        ]
        link_s_per_token = to.info.kv_bytes_per_token / (self._fleet.link_bytes_per_s or PRIOR_BYTES_PER_S)
        return choose_holder(holders, cached_tokens, self._predictor.s_per_token, link_s_per_token)

    def _lenders(self, active: ActiveRequest, hits: Hits) -> Iterator[tuple[WorkerView, WorkerLoad, int]]:
        """Of the workers with most of the prompt those from which another one could fetch it, and how many tokens of
        it each has, the most first."""
        # A prompt with media is not fetched; of one that may crash engines only the request itself may be on trial.
        if not self._fetches or active.parsed.has_media or active.crashes:
            return
        for name, blocks in islice(hits.longest(), MAX_HOLDERS):
            view = self._fleet.workers.get(name)
            if view is not None and view.load is not None and view.info.lends and not view.quiet and view.usable_as:
                yield view, view.load, blocks * self._fleet.block_size

    def _host_tokens(self, view: WorkerView, keys: Sequence[int], tokens: int) -> int:
        """Of the prompt's first `tokens` that a worker holds, those that only its host tier has."""
        on_device = self._prefixes.blocks_on_device(view.info.id, keys, tokens // self._fleet.block_size)
        return tokens - on_device * self._fleet.block_size

    def _priced(self, adapter: int, candidates: list[Candidate]) -> list[Candidate]:
        if not adapter:
            return candidates
        self._predictor.adapter_load_s = self._fleet.adapters.load_s
        return self._policies.priced(adapter, candidates, self._fleet.adapters.places[_DECODE])

    def _adapter_at_prefill(self, adapter: int) -> tuple[dict[str, int], int]:
        return self._policies.at_prefill(adapter, self._fleet.adapters.places[_PREFILL]) if adapter else ({}, 0)

    def _prefill_pool(self, cached_tokens: int = 0, blocked: str | None = None, adapter_tokens: int = 0) -> PrefillView:
        ready, depth = self._fleet.ready(_PREFILL), self._queue.depth
        decode = self._fleet.ready(_DECODE)
        return PrefillView(
            ready, depth, cached_tokens, blocked=blocked, adapter_tokens=adapter_tokens, decode_ready=decode
        )

    def _job(self, active: ActiveRequest, uncached_tokens: int, cached: dict[str, int], later_s: float) -> PrefillJob:
        info = active.parsed.info
        # Another attempt has the place of the first: the queue dates it anew, since `withdraw` has removed that job.
        waited_s = time.monotonic() - active.accepted_at if active.attempt > 1 else 0.0
        return PrefillJob(
            request_id=info.id,
            attempt=active.attempt,
            tokens=info.prompt_tokens,
            uncached_tokens=uncached_tokens,
            arrived_at=info.arrived_at + waited_s,
            reply_to=self._frontend_id,
            body=pack_frames(active.parsed.frames),
            delay_s=self._policies.delay_s(info, uncached_tokens, later_s) - waited_s,
            cached=cached,
            ttft_s=info.ttft_slo_s or 0.0,
        )
