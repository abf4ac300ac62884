"""What a LoRA adapter costs a request at a worker: the load where it is absent, and the wait for one of its slots.

Both are seconds, which `priced` turns into the prompt tokens that could be computed meanwhile. So the decode choice and
placement weigh an adapter against queues as they weigh a cached prefix. An adapter counts as there from the moment in
which a request with it was sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice

import msgspec

from orchestrator.policy.decode_choice import Candidate

PRIOR_LOAD_S = 0.1  # of an adapter, until a worker has measured one; chosen, not derived
DEMAND_MEMORY = 1000.0  # requests with adapters after which the weight of one has decayed to 1/e
MAX_KNOWN = 4096  # adapters whose demand is known
DEAREST_LOAD = 3.0  # loads that one costs at a worker whose adapters are all asked for far more often
LOADS_AT_PREFILL = 2  # that one costs where no prefill worker has it: it displaces another, and decode has it anyway
MAX_HOLDERS = 8  # workers that a job names as having its adapter
FEW = 4  # workers of a large fleet that are considered for having an adapter, and as many for a free slot


class AdapterDemand:
    """How often each adapter is asked for, relative to the others."""

    def __init__(self) -> None:
        self._weight = 1.0  # of the next request: it grows, in place of all others' decaying
        self._asked: dict[int, float] = {}

    def count(self, adapter: int) -> None:
        self._asked[adapter] = self._asked.get(adapter, 0.0) + self._weight
        self._weight *= 1 + 1 / DEMAND_MEMORY
        if self._weight > 1e100 or len(self._asked) > MAX_KNOWN:
            kept = sorted(self._asked.items(), key=lambda item: -item[1])[: MAX_KNOWN // 2]
            self._asked = {known: asked / self._weight for known, asked in kept}
            self._weight = 1.0

    def preferred(self, other: int, adapter: int) -> float:
        """How likely the next request with one of the two is with `other`."""
        asked = self._asked.get(other, 0.0)
        return asked / (asked + self._asked.get(adapter, 0.0) + self._weight)


def with_placed(requests: Mapping[int, int], placed: Iterable[int]) -> dict[int, int]:
    """What a worker reported, and one more request for each of these adapters."""
    there = dict(requests)
    for adapter in placed:
        there[adapter] = there.pop(adapter, 0) + 1
    return there


def adapter_s(
    adapter: int, requests: Mapping[int, int], slots: int, load_s: float, rest_s: float, demand: AdapterDemand
) -> float:
    """Seconds that a request spends on its adapter at a worker with these `slots`.

    `requests`: how many it has with each adapter; 0 for one that is loaded and idle. `rest_s`: mean time until a
    request there ends.

    A load displaces another adapter, which is loaded again later. The more the adapters there are asked for, compared
    with this one, the more that costs: up to `DEAREST_LOAD` loads. So seldom ones share workers, and displace each
    other. Where requests have all slots, another adapter waits until the last request of one of them has ended, behind
    the adapters that wait already.
    """
    busy = [count for count in requests.values() if count]
    waiting = len(busy) - slots  # adapters, if more than 0
    if requests.get(adapter, 0) or (adapter in requests and waiting < 0):
        return min(busy) * rest_s * waiting / len(busy) if waiting > 0 else 0.0
    if waiting >= 0:
        return load_s + min(busy) * rest_s * (1 + waiting)
    if len(requests) < slots:
        return load_s
    displaced = sum([demand.preferred(known, adapter) for known in requests]) / len(requests)
    return load_s * (1 + (DEAREST_LOAD - 1) * displaced)


class AdapterPlaces:
    """Which workers of a pool have which adapters. Workers without LoRA are left out."""

    def __init__(self) -> None:
        self._there: dict[str, tuple[int, Mapping[int, int], int]] = {}  # by worker: as in `update`
        self._having: dict[int, dict[str, None]] = {}  # by adapter, the workers
        self._free: dict[str, None] = {}  # workers that could load one at once
        self._turn = 0

    def update(self, worker_id: str, slots: int, requests: Mapping[int, int], pending_tokens: int = 0) -> None:
        """`requests` as in `adapter_s`, those included that were sent and are not reported yet. `pending_tokens`: of
        prompts, which the worker has to compute."""
        if slots and (slots, requests, pending_tokens) != self._there.get(worker_id):
            self.remove(worker_id)
            self._there[worker_id] = slots, requests, pending_tokens
            for adapter in requests:
                self._having.setdefault(adapter, {})[worker_id] = None
            if sum(map(bool, requests.values())) < slots:
                self._free[worker_id] = None

    def remove(self, worker_id: str) -> None:
        _, requests, _ = self._there.pop(worker_id, (0, dict[int, int](), 0))
        self._free.pop(worker_id, None)
        for adapter in requests:
            having = self._having[adapter]
            del having[worker_id]
            if not having:
                del self._having[adapter]

    def some(self, adapter: int) -> list[str]:
        """A few of the workers that have it, and of those that could load it at once: others each time."""
        return self._few(self._having.get(adapter, {})) + self._few(self._free)

    def _few(self, names: Mapping[str, None], few: int = FEW) -> list[str]:
        if len(names) <= few:
            return list(names)
        self._turn += 1
        first = self._turn % (len(names) - few + 1)
        return list(islice(names, first, first + few))

    def holders(self, adapter: int) -> list[str] | None:
        """The workers that a job is to name as having its adapter: of some of them, those with least to compute. None:
        no worker has it. Where most of many have it, none need be preferred."""
        having = self._having.get(adapter)
        if having is None:
            return None
        if len(having) > max(MAX_HOLDERS, len(self._there) // 2):
            return []
        some = self._few(having, 2 * MAX_HOLDERS)
        return sorted(some, key=lambda worker_id: self._there[worker_id][2])[:MAX_HOLDERS]

    def spent_s(self, worker_id: str, adapter: int, load_s: float, rest_s: float, demand: AdapterDemand) -> float:
        """`adapter_s` at this worker. One that tells nothing, as of a release before, is no better than a free one."""
        slots, requests, _ = self._there.get(worker_id, (0, {}, 0))
        if not slots:
            return load_s if self._there else 0.0
        return adapter_s(adapter, requests, slots, load_s, rest_s, demand)


def priced(
    candidates: Sequence[Candidate],
    adapter: int,
    places: AdapterPlaces,
    load_s: float,
    rest_s: float,
    s_per_token: float,
    demand: AdapterDemand,
) -> list[Candidate]:
    """The candidates, with what a request with this adapter spends on it there.

    An engine computes nothing while it loads: so a load delays all that runs there, which is taken to be the mean of
    these workers. By each worker's own number, the least busy would get all loads, whatever they displace.
    """
    found = []
    delayed = 1 + sum([candidate.running for candidate in candidates]) / max(1, len(candidates))
    for candidate in candidates:
        if spent_s := places.spent_s(candidate.worker_id, adapter, load_s, rest_s, demand):
            tokens = int(spent_s / s_per_token)
            candidate = msgspec.structs.replace(
                candidate,
                placed_tokens=candidate.placed_tokens + tokens,
                adapter_tokens=tokens,
                adapter_blocks=delayed * tokens / candidate.block_size,
            )
        found.append(candidate)
    return found
