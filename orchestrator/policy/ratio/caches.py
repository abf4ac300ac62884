"""What prompts would cost at another split, by what the caches of its workers would find of them."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from orchestrator.policy.ratio.attainment import Traffic
from orchestrator.policy.ratio.load import LoadSample
from orchestrator.policy.ratio.reuse import Curve, curve, uncached
from orchestrator.types import DesiredRatio

STEPS = 16  # of a bisection
# Prompts that leave more to compute than caches of this size should, by less than this share, say nothing of copies.
TOLERANCE = 0.05


class Caches(msgspec.Struct, frozen=True):
    """The memory of a fleet in which prefixes are cached.

    What a prefix is worth counts for who prefills: prefill workers claim what they have cached, and where none is left,
    a request goes where its prompt is least work. Who decodes what was prefilled elsewhere is chosen by memory, so that
    there prefixes are on more workers. How much of a role's memory holds *distinct* prefixes is measured: by what
    prompts leave to compute there, beside what they would if all of it did.
    """

    of: Curve
    prompts_per_s: float
    s_per_token: float  # of prefill
    worker_tokens: float
    answer_tokens: float  # in the memory of decode workers, where no prompt finds them
    prefill: int
    decode: int
    distinct: tuple[float, float]  # the share of the memory of prefill, and of decode workers

    def moved(self, traffic: Traffic, more: int) -> Traffic:
        """What prompts cost once `more` of the workers prefill, or fewer where negative."""
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
        """`left` on the prefill workers once there are `more` of them."""
        return self.left(self.prefill + more, self.distinct[0])

    def at_decode(self, more: int) -> tuple[float, float, float]:
        """`left` on the decode workers once `more` of them prefill."""
        distinct = self.distinct[1] if self.prefill + more else max(self.distinct)
        return self.left(self.decode - more, distinct, self.answer_tokens)

    def left(self, workers: int, distinct: float, taken_tokens: float = 0.0) -> tuple[float, float, float]:
        """Of the mean prompt, with so many workers of a role: uncached tokens, their square, and for how many seconds
        caches keep what nobody uses."""
        tokens = max(0.0, workers * self.worker_tokens - taken_tokens)
        return uncached(self.of, distinct * tokens, self.prompts_per_s)

    def distinct_share(self, measured: float, workers: int, taken_tokens: float = 0.0) -> float:
        """Of the memory of so many workers, where a mean prompt has so many uncached tokens; at least one's."""
        measured /= 1 + TOLERANCE
        if workers < 2 or self.left(workers, 1.0, taken_tokens)[0] >= measured:
            return 1.0
        low, high = 1 / workers, 1.0
        for _ in range(STEPS):
            middle = (low + high) / 2
            if self.left(workers, middle, taken_tokens)[0] < measured:
                high = middle
            else:
                low = middle
        return low


def caches_of(window: Sequence[LoadSample], arriving: Traffic, current: DesiredRatio) -> Caches | None:
    """As the window shows them; None where no prompt came, or nothing is known of the workers."""
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
