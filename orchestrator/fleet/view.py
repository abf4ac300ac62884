"""The live view of the fleet for decisions: each worker's last load, plus this frontend's placements since.

`membership` updates it from the registry and load reports; `router` reads it and records placements.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Mapping
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from orchestrator.config.values import labels_of
from orchestrator.fleet.pause import Pause, Rest
from orchestrator.fleet.worker_view import FleetAdapters, WorkerView
from orchestrator.policy.decode_choice import Candidate
from orchestrator.policy.prefix_index import Hits
from orchestrator.policy.shortlist import SHORTLIST_FROM, Shortlist
from orchestrator.types import (
    DesiredRatio,
    EngineSpeed,
    Link,
    Role,
    WorkerInfo,
    WorkerLoad,
    WorkerState,
    link_of,
)

T = TypeVar("T")

# Each decision asks for them: a name of a module is found five times as fast as a member of an enumeration.
_PREFILL, _DECODE = Role.PREFILL, Role.DECODE
MAX_HIT_WORKERS = 4  # workers of each role whose cached part of a prompt is considered


class Places:
    """Where workers are, by their labels, and the class of the link between two of them."""

    def __init__(self) -> None:
        self._labels: dict[str, dict[str, str]] = {}  # by worker
        self._names: dict[str, tuple[str, ...]] = {}  # the same as text
        self._count: Counter[tuple[str, ...]] = Counter()  # workers, by their labels

    @property
    def several(self) -> bool:
        """Whether there are workers with different labels."""
        return len(self._count) > 1

    def add(self, info: WorkerInfo) -> bool:
        """Add or replace a worker. Returns whether it is the first one that is elsewhere."""
        self.remove(info.id)
        alike = not self.several
        labels = self._labels[info.id] = labels_of(info.host, info.labels)
        names = self._names[info.id] = tuple(f"{name}={value}" for name, value in labels.items())
        self._count[names] += 1
        return alike and self.several

    def remove(self, worker_id: str) -> None:
        if self._labels.pop(worker_id, None) is not None:
            self._count[names := self._names.pop(worker_id)] -= 1
            if not self._count[names]:
                del self._count[names]

    def names(self, worker_id: str) -> tuple[str, ...]:
        """Its labels as text; none of an unknown worker, or where all workers are in one place."""
        return self._names.get(worker_id, ()) if self.several else ()

    def link(self, one: str | None, other: str | None) -> Link:
        """The class of the link between two workers."""
        return link_of(self._of(one), self._of(other))

    def links(self, worker_id: str, others: Iterable[Candidate]) -> dict[str, Link]:
        """The class of the link from this worker to each other one; none where all are in one place."""
        mine = self._of(worker_id)
        return {it.worker_id: link_of(mine, self._of(it.worker_id)) for it in others} if self.several else {}

    def _of(self, worker_id: str | None) -> Mapping[str, str]:
        return self._labels.get(worker_id or "", {})


class Candidates(msgspec.Struct, frozen=True):
    """The workers among which a placement chooses."""

    decode: list[Candidate]
    cached_at_prefill: dict[str, int]  # prompt tokens, by prefill worker, of the few that have most, most first

    @property
    def most_at_prefill(self) -> int:
        return next(iter(self.cached_at_prefill.values()), 0)


class Fleet:
    """All workers that are not known to be gone.

    Asking for candidates costs what has changed since the last time, not the number of workers: with a `static_score`
    (see `policy.shortlist`) a large fleet is asked for its few best.
    """

    def __init__(self, frontend_id: str, static_score: Callable[[Candidate], float] | None = None) -> None:
        self.frontend_id = frontend_id
        self.workers: dict[str, WorkerView] = {}
        self.pause = Pause()
        self.desired: DesiredRatio | None = None  # as this frontend has read it last
        self.rest: Rest | None = None  # where an idle model's workers can be asked for
        self.adapters = FleetAdapters()
        self.places = Places()
        self.block_size = 0  # tokens; the same on every worker, 0 before the first is known
        self.speed = EngineSpeed()  # of the worker that joined last and measured one
        self.link_bytes_per_s, self._fastest = 0.0, ""  # of the fastest link that any has measured lately, and whose
        self._domains: Counter[str] = Counter()  # workers of each; KV passes within one
        self._changed: set[str] = set()
        self._lost_ranks: set[str] = set()
        # One count for all workers: one that was thought lost and is found again remembers the last number it saw.
        self._numbers = itertools.count(1)
        # Usable workers in the order in which they came; of decode workers also those that are quiet.
        self._prefill: dict[str, bool] = {}
        self._decode: dict[str, Candidate] = {}
        self._quiet: dict[str, Candidate] = {}
        self._paired: int | None = None  # usable prefill workers whose KV a decode worker may get; None: to be counted
        self._shortlist = Shortlist(static_score) if static_score is not None else None

    def upsert(self, info: WorkerInfo, now: float) -> bool:
        """Add or update a worker. True if it is a new process: the requests of an older one with this id are lost.
        Raises ValueError for labels that cannot be read."""
        view = self.workers.get(info.id)
        if view is not None and view.info.kv.engine_id == info.kv.engine_id:
            if view.info is not info and view.info != info:
                view.note_info(info)
            return False
        if self.places.add(info):  # first, since it raises at labels that are damaged
            self._changed.update(self.workers)
        self._leave_domain(info.id)
        self.adapters.forget(info.id)
        self._domains[info.domain] += 1
        if self._domains[info.domain] == 1 and len(self._domains) == 2:
            self._changed.update(self.workers)  # until now nobody had to be found by a domain
        self.workers[info.id] = WorkerView(info, now, self._changed, self._numbers)
        self._note_link(info.id, 0.0)
        self.block_size = info.identity.block_size
        if info.speed.prefill_s_per_token:
            self.speed = info.speed
        return True

    def remove(self, worker_id: str) -> WorkerView | None:
        self._changed.add(worker_id)
        self._leave_domain(worker_id)
        view = self.workers.pop(worker_id, None)
        self.adapters.forget(worker_id)
        self.places.remove(worker_id)
        self._note_link(worker_id, 0.0)
        if view is not None and view.info.ranks:
            self._lost_ranks.add(worker_id)
        return view

    @property
    def broken_units(self) -> set[str]:
        """Units of which a rank was lost, and others are there still that do not leave too."""
        if not self._lost_ranks:
            return set()
        stay = [view.info for view in self.workers.values() if view.info.state is WorkerState.READY]
        self._lost_ranks &= {rank for info in stay for rank in info.ranks} - self.workers.keys()
        return {info.unit for info in stay if not self._lost_ranks.isdisjoint(info.ranks)}

    def take_load(self, load: WorkerLoad, now: float) -> None:
        if view := self.workers.get(load.worker_id):
            before, seen = view.load, load.seen.get(self.frontend_id, 0)
            view.note_load(load, seen, now)
            if view.load is load:
                self._note_link(load.worker_id, load.kv.link_bytes_per_s)
            if view.info.adapter_slots and view.load is load and self.adapters.take_load(load, before, seen, now):
                self._changed.add(load.worker_id)
            self.pause.note(load.worker_id, load.pause)

    def _note_link(self, worker_id: str, bytes_per_s: float) -> None:
        """All workers are compared only when the fastest one has gone, or knows its rate no more: once in minutes."""
        if bytes_per_s >= self.link_bytes_per_s:
            self.link_bytes_per_s, self._fastest = bytes_per_s, worker_id
        elif worker_id == self._fastest:
            rates = ((view.load.kv.link_bytes_per_s, name) for name, view in self.workers.items() if view.load)
            self.link_bytes_per_s, self._fastest = max(rates, default=(0.0, ""))

    def note_adapter(self, worker_id: str, adapter: int, now: float, sequence: int = 0) -> None:
        """A request with this LoRA adapter was sent to a worker, or a worker has claimed its job."""
        view = self.workers.get(worker_id) if adapter else None
        if view is not None and view.info.adapter_slots:
            self.adapters.sent(worker_id, adapter, now, sequence)
            self._changed.add(worker_id)

    def candidates(
        self,
        avoid: Collection[str] = (),
        hits: Hits | None = None,
        domain: str = "",
        adapter: int = 0,
        near: str = "",
    ) -> Candidates:
        """Who could take a request now, with what is cached there of the prompt that `hits` is of.

        Of many decode workers the best, some for this `adapter`, and the best of each place in which the worker `near`
        is. Quiet ones only when there is no other, as those in `avoid`, and then only the first of them. With a
        `domain` those alone that KV of it may pass to.
        """
        if self._changed:
            self.apply_changes()
        usable, block_size = self._decode or self._quiet, self.block_size
        mixed = bool(domain) and (len(self._domains) > 1 or domain not in self._domains)
        at_decode: dict[str, int] = {}
        at_prefill: dict[str, int] = {}
        if hits:
            within = _Within(usable, self.workers, domain) if mixed else usable
            at_decode, at_prefill = hits.longest_hits_by_kind(MAX_HIT_WORKERS, within, self._prefill, block_size)
        if self._shortlist is not None and len(self._decode) >= SHORTLIST_FROM:  # it has none that is quiet
            if adapter:
                at_decode = dict.fromkeys(self.adapters.places[Role.DECODE].some(adapter), 0) | at_decode
            places = (*self.places.names(near), domain) if mixed else self.places.names(near)
            found = self._shortlist.pick(at_decode, places)
        else:
            found = list(usable.values())
        if mixed:
            found = [candidate for candidate in found if self.workers[candidate.worker_id].info.domain == domain]
        if avoid:
            kept = [candidate for candidate in found if candidate.worker_id not in avoid]
            found = kept or self._least_avoided(avoid, usable, domain if mixed else None)
        if hits and (held := hits.blocks_of([c.worker_id for c in found if not c.cached_tokens])):
            tokens = {name: blocks * block_size for name, blocks in held.items()}
            found = [replace(c, cached_tokens=tokens[c.worker_id]) if c.worker_id in tokens else c for c in found]
        return Candidates(found, at_prefill)

    def _least_avoided(
        self, avoid: Collection[str], usable: Mapping[str, Candidate], domain: str | None
    ) -> list[Candidate]:
        """All usable workers (of this domain) but those in `avoid`; if there is no other, the first of them."""
        there = {name: c for name, c in usable.items() if domain in (None, self.workers[name].info.domain)}
        others = [candidate for name, candidate in there.items() if name not in avoid]
        return others or [there[name] for name in avoid if name in there][:1]

    def ready(self, role: Role) -> int:
        """How many workers of that role can take a request now, without quiet prefill workers."""
        if self._changed:
            self.apply_changes()
        if role is _DECODE:
            return len(self._decode or self._quiet)
        if self._paired is None:
            decoded = self._decoded_domains()
            self._paired = sum(self.workers[name].info.domain in decoded for name in self._prefill)
        return self._paired

    def _decoded_domains(self) -> Collection[str]:
        """Those whose KV could pass to a decode worker. A fleet of one domain has none that it could not."""
        if len(self._domains) <= 1:
            return self._domains
        return {self.workers[name].info.domain for name in self._decode or self._quiet}

    def _leave_domain(self, worker_id: str) -> None:
        self._paired = None
        if (view := self.workers.get(worker_id)) is not None:
            self._domains[view.info.domain] -= 1
            self._domains += Counter()  # without domains that have no worker left

    def is_quiet(self, worker_id: str | None) -> bool:
        """Whether the worker is quiet; False for an unknown one."""
        view = self.workers.get(worker_id) if worker_id is not None else None
        return view is not None and view.quiet

    def has_other_decode_worker(self, worker_id: str) -> bool:
        """Whether there is another decode worker that is not quiet."""
        self.apply_changes()
        return len(self._decode) > (worker_id in self._decode)

    def claims(self) -> bool:
        """Whether anybody may claim from the queue: a prefill worker that is heard, or whose connection is down."""
        if self.ready(Role.PREFILL) > 0:
            return True
        decoded = self._decoded_domains()
        able = [it.info for it in self.workers.values() if not it.quiet and it.may_claim and it.info.domain in decoded]
        return any(info.role is Role.PREFILL and info.state is WorkerState.READY for info in able)

    def silent(self, now: float, timeout_s: float, reconnect_s: float) -> list[str]:
        """The workers that are lost: without a report for `timeout_s`, or disconnected for `reconnect_s`."""
        return [
            worker_id
            for worker_id, view in self.workers.items()
            if ((view.greeted or view.load is not None) and now - view.last_heard_at > timeout_s)
            or (view.disconnected_at is not None and now - view.disconnected_at > reconnect_s)
        ]

    def discount_stall(self, late_s: float, now: float) -> None:
        """This process did not run for the last `late_s` seconds, which do not count as silence of workers."""
        for view in self.workers.values():
            view.last_heard_at = min(now, view.last_heard_at + late_s)
            view.reported_at = min(now, view.reported_at + late_s)
            view.added_at = min(now, view.added_at + late_s)
            if view.disconnected_at is not None:
                view.disconnected_at = min(now, view.disconnected_at + late_s)

    def apply_changes(self) -> None:
        """Apply the load reports since the last call. `candidates` calls it first."""
        while self._changed:
            worker_id = self._changed.pop()  # first: a worker that meets a defect costs the others one call, not all
            view = self.workers.get(worker_id)
            role, quiet = (view.usable_as, view.quiet) if view is not None else (None, False)
            candidate = view.candidate if view is not None and role is _DECODE else None
            if view is not None and view.info.adapter_slots:
                self.adapters.update(view.info, view.load, None if quiet else role)
            # Nearly all changes are load reports of workers that stay what they are.
            if candidate is not None and not quiet and worker_id in self._decode:
                self._decode[worker_id] = candidate
            elif role is _PREFILL and not quiet and worker_id in self._prefill:
                continue
            elif self._move(worker_id, role, candidate, quiet):
                self._paired = None
            if self._shortlist is not None:
                if view is not None and candidate is not None and not quiet:
                    domain = (view.info.domain,) if len(self._domains) > 1 else ()
                    self._shortlist.update(candidate, (*self.places.names(worker_id), *domain))
                else:
                    self._shortlist.remove(worker_id)

    def _move(self, worker_id: str, role: Role | None, candidate: Candidate | None, quiet: bool) -> bool:
        """Where it belongs now. Returns whether it has come or gone anywhere."""
        changed = _set_or_drop(self._prefill, worker_id, True if role is Role.PREFILL and not quiet else None)
        changed |= _set_or_drop(self._decode, worker_id, None if quiet else candidate)
        return changed | _set_or_drop(self._quiet, worker_id, candidate if quiet else None)


class _Within:
    """Those of the usable workers that are of this domain."""

    def __init__(self, usable: Container[str], views: Mapping[str, WorkerView], domain: str) -> None:
        self._usable, self._views, self._domain = usable, views, domain

    def __contains__(self, worker_id: object) -> bool:
        return worker_id in self._usable and self._views[str(worker_id)].info.domain == self._domain


def _set_or_drop(ordered: dict[str, T], worker_id: str, value: T | None) -> bool:
    """None: it does not belong there. Returns whether it has come or gone."""
    there = worker_id in ordered
    if value is not None:
        ordered[worker_id] = value
    elif there:
        del ordered[worker_id]
    return there is (value is None)
