"""The cost of prompts at another split, whose prefill and decode workers have caches of another total size."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from orchestrator.policy.ratio.attainment import Split, Traffic
from orchestrator.policy.ratio.load import LoadSample
from orchestrator.policy.ratio.reuse import Curve, curve, uncached

STEPS = 16  # of a bisection
# While prompts have at most this share more uncached tokens than caches without duplicates would leave, the memory is
# taken to hold no duplicates.
TOLERANCE = 0.05


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
