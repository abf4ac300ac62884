"""The cost of prompts at another split, whose prefill and decode workers have caches of another total size.

A cache finds a block that is used again before it is evicted. How long it keeps an unused block follows from its size:
in T seconds it takes in the blocks that prompts bring and that were not used in the last T seconds. (X. Hu et al.,
"Kinetic modeling of data eviction in cache", USENIX ATC 2016; there T is the average eviction time.) So one histogram
of ages at reuse gives the hits for every cache size, and nothing is simulated.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from orchestrator.policy.prefix_keys import AGES_S, Reuse
from orchestrator.policy.ratio.attainment import Split, Traffic, after_moves
from orchestrator.policy.ratio.load import LoadSample

STEPS = 16  # of a bisection
# While prompts have at most this share more uncached tokens than caches without duplicates would leave, the memory is
# taken to hold no duplicates.
TOLERANCE = 0.05


class Curve(msgspec.Struct, frozen=True):
    """Uncached tokens of the mean prompt, by how long caches keep an unused block: 0 s, then each of `AGES_S`.

    `uncached2` has the means of their squares. `loose` are the tokens of the mean prompt that fill no block, which
    caches never keep.
    """

    uncached: tuple[float, ...]
    uncached2: tuple[float, ...]
    loose: float


def curve(counts: Iterable[Reuse]) -> Curve | None:
    """The curve of all counts together; None if no prompt arrived."""
    total = sum(counts, Reuse())
    count = total.prompts
    if not count:
        return None
    left, left2 = total.tokens, total.tokens2
    uncached, uncached2 = [left / count], [left2 / count]
    for saved, saved2 in zip(total.saved, total.saved2, strict=True):
        left, left2 = left - saved, left2 - saved2
        uncached.append(left / count)
        uncached2.append(left2 / count)
    return Curve(tuple(uncached), tuple(uncached2), (total.tokens - total.keyed) / count)


def uncached(of: Curve, cache_tokens: float, prompts_per_s: float) -> tuple[float, float, float]:
    """For caches of `cache_tokens` in all: mean uncached tokens of a prompt, their mean square, and the seconds for
    which the caches keep an unused block.

    The caches fill by the blocks that were not used within that time; the walk ends at the age at which they are full.
    """
    filled, before_s = 0.0, 0.0
    for n, age_s in enumerate(AGES_S):
        u0, u1 = of.uncached[n], of.uncached[n + 1]
        more = prompts_per_s * (age_s - before_s) * ((u0 + u1) / 2 - of.loose)
        if filled + more >= cache_tokens:
            share = (cache_tokens - filled) / more if more > 0 else 1.0
            return (
                u0 + share * (u1 - u0),
                of.uncached2[n] + share * (of.uncached2[n + 1] - of.uncached2[n]),
                before_s + share * (age_s - before_s),
            )
        filled, before_s = filled + more, age_s
    return of.uncached[-1], of.uncached2[-1], AGES_S[-1]


class Caches(msgspec.Struct, frozen=True):
    """The memory in which a fleet caches prefixes.

    A prefix can be cached on several workers of a role, so only a share of the role's memory holds *distinct* prefixes.
    That share is higher on prefill workers, which claim the jobs that they have cached. After a remote prefill the
    decode worker is chosen by free memory, which spreads copies. Without prefill workers a request goes where its
    prompt is least work. The share is measured: it is the one that explains the uncached tokens of the role's prompts.
    """

    of: Curve
    prompts_per_s: float
    s_per_token: float  # prefill time
    worker_tokens: float  # of KV that one worker caches
    answer_tokens: float  # generated tokens in the memory of all decode workers, which no prompt can reuse
    prefill: int  # workers
    decode: int
    distinct: tuple[float, float]  # share of the memory that holds distinct prefixes: prefill workers, decode workers

    def moved(self, traffic: Traffic, more: int) -> Traffic:
        """The traffic after `more` workers have gone to prefill; a negative number goes to decode."""
        (before, before2, _), (after, after2, _) = self.at_prefill(0), self.at_prefill(more)
        (local_before, local_before2, _), (local_after, local_after2, _) = self.at_decode(0), self.at_decode(more)
        prefill_s = max(0.0, traffic.prefill_s + self.s_per_token * (after - before))
        local_s = max(0.0, traffic.local_s + self.s_per_token * (local_after - local_before))
        per_square = self.s_per_token * self.s_per_token
        return msgspec.structs.replace(
            traffic,
            prefill_s=prefill_s,
            prefill_s2=max(prefill_s * prefill_s, traffic.prefill_s2 + per_square * (after2 - before2)),
            local_s=local_s,
            local_s2=max(local_s * local_s, traffic.local_s2 + per_square * (local_after2 - local_before2)),
        )

    def at_prefill(self, more: int) -> tuple[float, float, float]:
        """`misses` on the prefill workers after `more` workers have gone to prefill."""
        return self.misses(self.prefill + more, self.distinct[0])

    def at_decode(self, more: int) -> tuple[float, float, float]:
        """`misses` on the decode workers after `more` of them have gone to prefill.

        Without prefill workers requests go where they are cached, so the higher of both shares is used.
        """
        distinct = self.distinct[1] if self.prefill + more else max(self.distinct)
        return self.misses(self.decode - more, distinct, self.answer_tokens)

    def misses(self, workers: int, distinct: float, taken_tokens: float = 0.0) -> tuple[float, float, float]:
        """The mean of a prompt's uncached tokens, the mean of their square, and the seconds for which caches keep an
        unused block, if a role has `workers` workers whose memory less `taken_tokens` holds prefixes."""
        tokens = max(0.0, workers * self.worker_tokens - taken_tokens)
        return uncached(self.of, distinct * tokens, self.prompts_per_s)

    def distinct_share(self, measured: float, workers: int, taken_tokens: float = 0.0) -> float:
        """The share of the memory of `workers` workers that holds distinct prefixes, if prompts have `measured`
        uncached tokens on average. At least the memory of one worker does."""
        measured /= 1 + TOLERANCE
        if workers < 2 or self.misses(workers, 1.0, taken_tokens)[0] >= measured:
            return 1.0
        low, high = 1 / workers, 1.0
        for _ in range(STEPS):
            middle = (low + high) / 2
            if self.misses(workers, middle, taken_tokens)[0] < measured:
                high = middle
            else:
                low = middle
        return low


def caches_of(window: Sequence[LoadSample], arriving: Traffic, current: Split) -> Caches | None:
    """The caches that a window of samples shows; None without prompts, or while the workers' memory or speed is not
    known."""
    last, of = window[-1], curve(sample.reuse for sample in window)
    if of is None or not last.worker_tokens or not last.prefill_s_per_token:
        return None
    caches = Caches(
        of=of,
        prompts_per_s=arriving.requests_per_s,
        s_per_token=last.prefill_s_per_token,
        worker_tokens=last.worker_tokens,
        answer_tokens=last.sequences * arriving.output_tokens / 2,
        prefill=current.prefill,
        decode=current.decode,
        distinct=(1.0, 1.0),
    )
    prefill, local = arriving.prefill_s / last.prefill_s_per_token, arriving.local_s / last.prefill_s_per_token
    return msgspec.structs.replace(
        caches,
        distinct=(
            caches.distinct_share(prefill, current.prefill) if current.prefill else 0.0,
            caches.distinct_share(local, current.decode, caches.answer_tokens),
        ),
    )


def traffic_after(arriving: Traffic, caches: Caches | None, current: Split, more: int) -> Traffic:
    """The traffic after `more` workers have gone to prefill; a negative number goes to decode.

    There are two estimates: workers keep their caches when they change roles (`after_moves`), and caches of another
    total size keep more or less (`Caches.moved`). A role that shrinks has the cost of its smaller caches. Decode
    workers that become more have the lower of both costs, because all prompts go there. Prefill workers that become
    more have that of `after_moves`: they see only prompts that are prefilled remotely, so larger caches need not find
    more.
    """
    along = after_moves(arriving, current.prefill, current.decode, more)
    if caches is None:
        return along
    kept = caches.moved(arriving, more)
    if more < 0:
        along = msgspec.structs.replace(along, prefill_s=kept.prefill_s, prefill_s2=kept.prefill_s2)
        if kept.local_s >= along.local_s:
            return along
    return msgspec.structs.replace(along, local_s=kept.local_s, local_s2=kept.local_s2)
