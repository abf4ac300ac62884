"""The simulated router and queue. `orchestrator.policy` makes every decision, on load reports of a given age."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from orchestrator.config.settings import SLOConfig
from orchestrator.policy.choices.named import BYPASSES, decode_choice
from orchestrator.policy.claims import AFFINITY_WINDOW, choose_claims, fair_share_tokens
from orchestrator.policy.decode_choice import Candidate
from orchestrator.policy.placement import Local, PrefillView, Reject, claim_timeout_s
from orchestrator.policy.policies import Policies, Waiting, haste, latest_tpot
from orchestrator.policy.predict.estimates import LINK_AGE_S, RecentMaximum
from orchestrator.policy.predict.predictor import Predictor
from orchestrator.policy.prefix_index import PrefixIndex
from orchestrator.policy.prefix_keys import ReuseCounter
from orchestrator.simulator.engine.stay import Phase, Stay
from orchestrator.simulator.job import Job
from orchestrator.simulator.racks import Racks
from orchestrator.simulator.settings import Settings
from orchestrator.simulator.view import PoolView, limits_of_claims, prefills
from orchestrator.simulator.worker import Worker
from orchestrator.types import Offered, PrefixEvents, QueueDepth, WindowJob

REFRESH_HITS_S = 1.0  # older prefix hits of a waiting job are looked up again


class Clock(Protocol):
    now: float


class Router:
    """Places requests and keeps the prefill queue. Calls `end(job, "rejected")` for each request that it refuses."""

    def __init__(
        self,
        settings: Settings,
        unit_tokens: int,
        clock: Clock,
        racks: Racks,
        end: Callable[[Job, str], None],
        fetch: Callable[[Stay, Worker], bool],
    ) -> None:
        """`fetch(stay, worker)`: whether the worker fetches a prefix first; it submits the stay after that."""
        profile, self.stack = settings.profile, settings.stack
        self._unit_tokens = unit_tokens
        self._clock, self._racks, self._end, self._fetch = clock, racks, end, fetch
        config = self.stack.config
        slo = settings.slo or SLOConfig(ttft_s=profile.ttft_slo_s, tpot_s=profile.tpot_slo_s)
        self.slo = msgspec.structs.replace(config.slo, ttft_s=slo.ttft_s, tpot_s=slo.tpot_s)
        self.choose = decode_choice(config.routing.decode_choice, settings.seed)
        self.choose_prefill = decode_choice(config.routing.decode_choice, settings.seed + 1)
        self.predictor = Predictor()
        self.predictor.set_prior(profile.speed)
        self.predictor.adapter_load_s = profile.adapter_load_s or self.predictor.adapter_load_s
        self.tpot = latest_tpot(self.slo, self.predictor)
        config = msgspec.structs.replace(config, slo=self.slo)
        self.policies = Policies(config, self.choose, self.predictor, self.tpot)
        self.decode = PoolView(self.choose, racks)
        self.prefill = PoolView(self.choose_prefill, racks)
        # The keys of a load are of units that are long already, so each is remembered.
        self.index = PrefixIndex(expected_step=1) if settings.stack.prefixes and unit_tokens else None
        self.queue: list[tuple[float, int, Job]] = []
        self.queue_tokens = self.claimed = 0
        self.reasons: Counter[str] = Counter()
        self.offered, self.reuse = Offered(), ReuseCounter()
        self.link_bytes_per_s = RecentMaximum(LINK_AGE_S)
        self._index_sequence: Counter[str] = Counter()

    # ---- placement -------------------------------------------------------------------------------------------

    def place(self, job: Job, again: bool = False) -> bool:
        """Place a request that has arrived. With `again` it has lost its worker, and is not refused.

        Returns False if no worker takes the request now.
        """
        if self.stack.dispatch == "push":
            return self._push(job) or self._refuse(job, again)
        self.settled(job)
        hits = self.look_up(job)
        request = job.info()
        if job.first_at is not None and self.stack.config.routing.fallback == "refuse":
            request = msgspec.structs.replace(request, local_only="retry")  # a stream that has started goes on
        candidates = self._candidates(job, hits)
        cached = self._prefill_hit(hits)
        depth = QueueDepth(len(self.queue), self.queue_tokens, self.claimed)
        absent = self._find_adapter(job)
        view = PrefillView(len(self.prefill), depth, cached, adapter_tokens=absent, decode_ready=len(self.decode))
        ruling = self.policies.decide(request, candidates, view, self._clock.now, admission=not again)
        decision = ruling.decision
        self.reasons[f"{type(decision).__name__.lower()}:{decision.reason}"] += 1
        shared = self.reuse.arrived(job.prompt_tokens, job.arrival.keys, self._unit_tokens, self._clock.now)
        nearest = max([candidate.cached_tokens for candidate in candidates], default=0)
        at_prefill, at_decode = [max(1, job.prompt_tokens - max(hit, shared)) for hit in (cached, nearest)]
        if not again:
            self.tpot.came(request.tpot_slo_s)
        urgency = haste(request.ttft_slo_s, self.slo)
        self.offered += Offered.one(at_prefill, at_decode, self.predictor.output_tokens, urgency)
        if isinstance(decision, Reject):
            return self._refuse(job, again and not decision.no_fallback)
        if isinstance(decision, Local):
            self._place_locally(job, decision, candidates, ruling.later_s)
        else:
            self._enqueue(job, max(1, job.prompt_tokens - cached), ruling.later_s)
        return True

    def _refuse(self, job: Job, again: bool) -> bool:
        if not again:
            self._end(job, "rejected")
        return False

    def _place_locally(self, job: Job, decision: Local, candidates: Sequence[Candidate], later_s: float = 0.0) -> None:
        candidate = next(c for c in candidates if c.worker_id == decision.worker_id)
        compute = max(1, job.prompt_tokens - candidate.cached_tokens)
        job.local_tokens = candidate.waiting_tokens + candidate.placed_tokens + compute
        job.placed_at = self._clock.now
        job.beside = candidate.running + candidate.waiting
        order = job.arrival.at + self.policies.engine_delay_s(job.info(), compute, later_s)
        if self.index is not None:
            self.index.expected.sent(str(job.id), decision.worker_id, job.arrival.keys)
        self._submit(job, decision.worker_id, "local", compute, order)

    def _push(self, job: Job) -> bool:
        """Place as other projects' routers do: choose both workers at arrival; the prompt waits at the prefill worker.

        Returns False if there are no workers.
        """
        hits = self.look_up(job)
        request = job.info()
        prefill = self.choose_prefill(request, self.prefill.candidates(hits))
        decode = self.choose(request, self.decode.candidates(hits))
        if prefill is None or decode is None:
            self.reasons["reject:no_worker"] += 1
            return False
        if self.stack.bypass and BYPASSES[self.stack.bypass](job.prompt_tokens, decode.cached_tokens):
            self.reasons["local:push"] += 1
            compute = max(1, job.prompt_tokens - decode.cached_tokens)
            self._submit(job, decode.worker_id, "local", compute, self._clock.now)
            return True
        self.reasons["remote:push"] += 1
        job.bound = decode.worker_id
        self.prefill.placed(prefill.worker_id, job.prompt_tokens, job.prompt_tokens - prefill.cached_tokens)
        self.decode.promised(decode.worker_id, job.prompt_tokens)
        self._start_prefill(job, self.prefill.worker(prefill.worker_id))
        return True

    def bind(self, job: Job, stay: Stay) -> None:
        """Send a request whose prefill starts to its decode worker, which is chosen now unless it was at arrival."""
        name = job.bound
        if name is not None:
            self.decode.promised(name, job.prompt_tokens, -1)
            job.bound = None
        if name is None or name not in self.decode:
            candidates = self._candidates(job, self.look_up(job), stay.worker)
            if self.stack.dispatch == "push":
                chosen = self.choose(job.info(), candidates)
            else:
                links = self._racks.links(stay.worker, [it.worker_id for it in candidates])
                chosen = self.policies.pair(job.info(), candidates, links, self._clock.now)
            if chosen is None:
                stay.peer = None
                return
            name = chosen.worker_id
            job.beside = chosen.running + chosen.waiting
        self.decode.placed(name, job.prompt_tokens, 0, job.adapter)
        order = self._clock.now
        if self.stack.dispatch == "queue":
            order = job.arrival.at + self.policies.engine_delay_s(job.info())
        receiver = job.stay("remote", order)
        receiver.peer, stay.peer = stay, receiver
        self.decode.worker(name).submit(receiver, self._clock.now)

    def _submit(self, job: Job, name: str, phase: Phase, compute: int, order: float) -> None:
        self.decode.placed(name, job.prompt_tokens, compute, job.adapter)
        self._begin(job.stay(phase, order, job.prompt_tokens - compute), self.decode.worker(name))

    def _begin(self, stay: Stay, worker: Worker) -> None:
        """Submit a stay that computes its prompt, or have the worker fetch what it can of that first."""
        if self.stack.dispatch == "push" or not self._fetch(stay, worker):
            worker.submit(stay, self._clock.now)

    def look_up(self, job: Job) -> dict[str, int]:
        """Cached tokens of the job's prompt by worker, as the prefix index has them."""
        if self.index is not None and job.arrival.keys:
            unit = self._unit_tokens
            job.hits = {name: depth * unit for name, depth in self.index.match(job.arrival.keys).items()}
            job.hits_at = self._clock.now
        return job.hits

    def _candidates(self, job: Job, hits: dict[str, int], near: str = "") -> list[Candidate]:
        return self.policies.priced(job.adapter, self.decode.candidates(hits, job.adapter, near), self.decode.adapters)

    def _find_adapter(self, job: Job) -> int:
        """Look up which prefill workers have the job's adapter, and what that saves. Returns what no worker saves."""
        job.adapter_at, absent = self.policies.at_prefill(job.adapter, self.prefill.adapters)
        return absent

    def _prefill_hit(self, hits: dict[str, int]) -> int:
        """Cached tokens on the prefill worker with most of them."""
        cached = 0
        for name, tokens in hits.items():
            if tokens > cached and name in self.prefill:
                cached = tokens
        return cached

    # ---- the prefill queue -----------------------------------------------------------------------------------

    def _enqueue(self, job: Job, uncached: int, later_s: float) -> None:
        score = job.arrival.at + self.policies.delay_s(job.info(), uncached, later_s)
        depth = QueueDepth(len(self.queue), self.queue_tokens, self.claimed)
        job.uncached = uncached
        job.enqueued_at = self._clock.now
        job.backlog_s = self.predictor.backlog_s(depth, len(self.prefill))
        self.queue_tokens += uncached
        insort(self.queue, (score, job.id, job))
        # All workers with budget left may claim: those with the longest hit first, and of equal ones the least loaded.
        asking = [
            (-job.hits.get(worker.name, 0) - job.adapter_at.get(worker.name, 0), worker.pending_tokens, worker.name)
            for worker in self.prefill.workers()
            if limits_of_claims(worker, self.slo, self.predictor.s_per_token)[0] > 0
        ]
        for _, _, name in sorted(asking):
            self.claim(self.prefill.worker(name))
            if job.claimed:
                break

    def recall(self) -> None:
        """Take jobs from the queue that are past their claim deadline, and jobs that a decode worker should prefill
        now (`Policies.recalled`)."""
        now = self._clock.now
        for entry in list(self.queue):
            job = entry[2]
            claim_s = claim_timeout_s(self.stack.config.routing, self.slo, job.arrival.ttft_slo_s)
            if now - job.enqueued_at > claim_s:
                self._time_out(entry)
        depth = QueueDepth(len(self.queue), self.queue_tokens, self.claimed)
        queued = ((entry, self._waiting(entry[2])) for entry in self.queue)
        for entry, local, chosen in self.policies.recalled(queued, depth, len(self.prefill)):
            self._leave_queue(entry, local, [chosen])

    def _time_out(self, entry: tuple[float, int, Job]) -> None:
        waiting = self._waiting(entry[2])
        request, empty = waiting.request, QueueDepth(0, 0, self.claimed)
        view = PrefillView(len(self.prefill), empty, waiting.cached_at_prefill, blocked="claim_timeout")
        if self.stack.config.routing.fallback == "local":
            request = msgspec.structs.replace(request, local_only="claim_timeout")
        decision = self.policies.decide(request, waiting.candidates, view, self._clock.now, admission=False).decision
        if isinstance(decision, Local):
            self._leave_queue(entry, decision, waiting.candidates)
        elif isinstance(decision, Reject) and decision.no_fallback:
            self.reasons[f"reject:{decision.reason}"] += 1
            self._remove(entry)
            self._end(entry[2], "rejected")

    def _waiting(self, job: Job) -> Waiting:
        stale = self._clock.now - job.hits_at > REFRESH_HITS_S
        hits = self.look_up(job) if stale else job.hits
        seen = self._candidates(job, hits)
        return Waiting(job.info(), job.uncached, seen, self._prefill_hit(hits), self._find_adapter(job))

    def _leave_queue(self, entry: tuple[float, int, Job], local: Local, candidates: Sequence[Candidate]) -> None:
        self.reasons[f"recalled:{local.reason}"] += 1
        self._remove(entry)
        self._place_locally(entry[2], local, candidates)

    def _remove(self, entry: tuple[float, int, Job]) -> None:
        job = entry[2]
        self.queue_tokens -= job.uncached
        job.enqueued_at = -1.0
        del self.queue[bisect_left(self.queue, entry[:2])]

    def claim(self, worker: Worker) -> None:
        """Let a prefill worker claim jobs at the head of the queue, window by window, as its budget allows."""
        while self.queue and worker.name in self.prefill and self._claim_from_window(worker):
            pass

    def claim_again(self) -> None:
        """Let idle workers claim again: they leave a job to a worker with its prefix cached only for some time."""
        for worker in self.prefill.workers():
            if not prefills(worker):
                self.claim(worker)

    def _claim_from_window(self, worker: Worker) -> bool:
        now, s_per_token = self._clock.now, self.predictor.s_per_token
        budget, jobs, idle = limits_of_claims(worker, self.slo, s_per_token)
        if budget <= 0:
            return False
        head = self.queue[:AFFINITY_WINDOW]
        window = []
        for score, number, job in head:
            if now - job.hits_at > REFRESH_HITS_S:
                self.look_up(job)
                self._find_adapter(job)
            elsewhere = 0
            for name, tokens in (Counter(job.hits) + Counter(job.adapter_at) if job.adapter_at else job.hits).items():
                if tokens > elsewhere and name != worker.name and name in self.prefill:
                    elsewhere = tokens
            here = job.hits.get(worker.name, 0), elsewhere, job.adapter_at.get(worker.name, 0)
            window.append(WindowJob(str(number), score, job.prompt_tokens, now - job.enqueued_at, *here))
        others = sum(other.pending_tokens == 0 and other is not worker for other in self.prefill.workers())
        share = fair_share_tokens(self.queue_tokens, others)
        chosen = choose_claims(window, budget, idle, s_per_token, 1.0, share)[:jobs]
        by_id = {str(entry[1]): entry for entry in head}
        for entry in map(by_id.__getitem__, chosen):
            del self.queue[bisect_left(self.queue, entry[:2])]
            self.queue_tokens -= entry[2].uncached
            entry[2].claimed = True
            worker.claimed.came(entry[2].arrival.ttft_slo_s)
            self._start_prefill(entry[2], worker)
        return bool(chosen)

    def _start_prefill(self, job: Job, worker: Worker) -> None:
        self.claimed += 1
        job.placed_at = self._clock.now
        self.prefill.expect(worker.name, job.adapter)
        self._begin(job.stay("prefill", self._clock.now, job.hits.get(worker.name, 0)), worker)

    # ---- reports of workers ----------------------------------------------------------------------------------

    def report(self, view: PoolView, worker: Worker, now: float) -> None:
        """Take a load report and the cache events since the last one."""
        view.reported(worker, now)
        if self.index is not None and worker.kv.dirty:
            stored, removed, hosted = worker.kv.take_changes()
            self._index_sequence[worker.name] += 1
            number = self._index_sequence[worker.name]
            self.index.apply(PrefixEvents(worker.name, number, stored, removed, hosted=hosted))

    def settled(self, job: Job) -> None:
        """The worker of the job has computed its prompt, or will not."""
        if self.index is not None:
            self.index.expected.settled(str(job.id))

    def ended(self, job: Job, worker: Worker) -> None:
        """Feed the predictor with a request whose last token its decode worker has generated."""
        if job.arrival.output_tokens > 1 and not job.generated and job.decoding_at is not None:
            tpot_s = (self._clock.now - job.decoding_at) / (job.arrival.output_tokens - 1)
            self.predictor.observe_itl(worker.name, tpot_s, job.beside + 1)
        self.predictor.observe_output(job.arrival.output_tokens)
        for choose in (self.choose, self.choose_prefill):
            choose.expect_output(self.predictor.output_tokens)
