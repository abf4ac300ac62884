"""Pairs of a prefill and a decode worker between which no KV comes, though both are heard: a firewall, a cut link.

Each prompt that is sent there waits for seconds, and the blocks that its decode worker has reserved for it stay so for
longer; or its KV is refused, and it is computed twice. So a pair rests after a few such ones in a row, ever longer, and
then one prompt tries it.
"""

from __future__ import annotations

from dataclasses import dataclass

LATE_IN_A_ROW = 2  # one may have been sent just before a connection broke, and the next one makes it anew
FIRST_REST_S, MOST_REST_S = 5.0, 60.0  # doubled with each prompt that tries it and is late
TRIAL_S = 10.0  # for which the prompt that tries it is alone, or until it is late
MOST_PAIRS = 16_384  # remembered, the latest: of an engine that has left nobody may be told


@dataclass(slots=True)
class _Late:
    in_a_row: int = 0
    rest_s: float = FIRST_REST_S / 2
    rests_until: float = 0.0
    on_trial: bool = False


class LatePairs:
    """Times are seconds of a clock that never goes back."""

    def __init__(self, in_a_row: int = LATE_IN_A_ROW) -> None:
        self._in_a_row = in_a_row
        self._pairs: dict[tuple[str, str], _Late] = {}  # those whose last KV was late

    def came(self, prefill: str, decode: str) -> None:
        """KV has come from one to the other."""
        self._pairs.pop((prefill, decode), None)

    def late(self, prefill: str, decode: str, now: float) -> bool:
        """It has not come, or not in time. Of many that were on their way together the first ones count: whether this
        one is of these."""
        pair = self._pairs.pop((prefill, decode), _Late())
        self._pairs[prefill, decode] = pair  # the latest last
        if len(self._pairs) > MOST_PAIRS:
            del self._pairs[next(iter(self._pairs))]
        counts = pair.in_a_row < self._in_a_row or pair.on_trial
        pair.in_a_row += 1
        if pair.in_a_row >= self._in_a_row and (pair.on_trial or now >= pair.rests_until):
            pair.rest_s = min(2 * pair.rest_s, MOST_REST_S)
            pair.rests_until, pair.on_trial = now + pair.rest_s, False
        return counts

    def resting(self, prefill: str, now: float) -> list[str]:
        """The decode workers to which this one is to send no KV now."""
        pairs = self._pairs.items()
        return [target for (source, target), pair in pairs if source == prefill and now < pair.rests_until]

    def tried(self, prefill: str, decode: str, now: float) -> None:
        """A prompt is sent that way. After a rest it is alone there until its KV has come, or has not."""
        pair = self._pairs.get((prefill, decode))
        if pair is not None and pair.in_a_row >= self._in_a_row:
            pair.rests_until, pair.on_trial = now + TRIAL_S, True

    def forget(self, worker_id: str) -> None:
        """It is gone."""
        self._pairs = {pair: late for pair, late in self._pairs.items() if worker_id not in pair}
