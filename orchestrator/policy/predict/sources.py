"""From which workers KV comes: whether a prompt's first tokens are fetched from another one's prefix cache, and between
which none comes though both are heard.

A fetch takes two engine steps and the time that its bytes take over the link. What only the host tier of the holder has
is loaded into its device first, which takes a step more and its bytes' time. It must be worth more than the errors of
these predictions: a fetch that fails has cost its time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

FIXED_S = 0.01  # messages, and a step of either engine beyond those that it takes anyhow
MIN_GAIN_S = 0.01
MAX_SHARE = 0.5  # of the time of computing the same tokens
NEAR_SHARE = 0.8  # of the largest gain: among holders that give so much, the least busy one is asked
MAX_HOLDERS = 8  # that are compared
# Of a link before its first large WRITE, and of host memory before the first load. They are high, so that the first try
# is made, which tells the rate: where no prompt is pushed, nothing else would.
PRIOR_BYTES_PER_S = PRIOR_LOAD_BYTES_PER_S = 1e10
# A fetch is given up after the time in which its tokens are computed twice, within these bounds.
MIN_WAIT_S, MAX_WAIT_S = 0.25, 2.0
LATE_IN_A_ROW = 2  # one may have been sent just before a connection broke, and the next one makes it anew
FIRST_REST_S, MOST_REST_S = 5.0, 60.0  # doubled with each prompt that tries it and is late
TRIAL_S = 10.0  # for which the prompt that tries it is alone, or until it is late
MOST_PAIRS = 16_384  # remembered, the latest: of an engine that has left nobody may be told


class Holder(msgspec.Struct, frozen=True):
    """A worker that has the first `tokens` of a prompt cached."""

    worker_id: str
    tokens: int
    requests: int  # running and waiting there
    step_s: float = 0.0  # of its engine
    link_extra_s: float = 0.0  # by which what it sends takes longer than over the fastest link
    host_tokens: int = 0  # of `tokens`, those that only its host tier has
    load_s_per_token: float = 0.0  # from there to its device

    @property
    def delay_s(self) -> float:
        load_s = self.step_s + self.host_tokens * self.load_s_per_token if self.host_tokens else 0.0
        return self.step_s + self.link_extra_s + load_s


def load_s_per_token(token_bytes: int, loaded_bytes: int, seconds: float, ranks: int = 1) -> float:
    """Of a host tier whose ranks, which load at once, have so far loaded so much in so long."""
    bytes_per_s = loaded_bytes / seconds if loaded_bytes and seconds else PRIOR_LOAD_BYTES_PER_S
    return token_bytes / (ranks * bytes_per_s)


def could_gain(tokens: int, compute_s_per_token: float) -> bool:
    """Whether fetching so many tokens could be worth it over the fastest link."""
    return tokens * compute_s_per_token * MAX_SHARE > FIXED_S + MIN_GAIN_S


def gain_s(tokens: int, delay_s: float, compute_s_per_token: float, link_s_per_token: float) -> float:
    """Seconds that fetching so many tokens saves; 0 where it is not worth it. `delay_s`: of this holder."""
    compute_s = tokens * compute_s_per_token
    fetch_s = FIXED_S + delay_s + tokens * link_s_per_token
    gain = compute_s - fetch_s
    return gain if gain > MIN_GAIN_S and fetch_s < MAX_SHARE * compute_s else 0.0


def choose_holder(
    holders: Iterable[Holder], cached_tokens: int, compute_s_per_token: float, link_s_per_token: float
) -> Holder | None:
    """The holder to fetch from, for a worker that has `cached_tokens` of the prompt itself. None: it computes them."""
    gains = [
        (gain_s(holder.tokens - cached_tokens, holder.delay_s, compute_s_per_token, link_s_per_token), holder)
        for holder in holders
        if holder.tokens > cached_tokens
    ]
    most = max((gain for gain, _ in gains), default=0.0)
    near = [(holder.requests, -gain, holder.worker_id, holder) for gain, holder in gains if gain >= NEAR_SHARE * most]
    return min(near)[-1] if most > 0 else None


def wait_limit_s(tokens: int, compute_s_per_token: float) -> float:
    """After so long a fetch is given up, and its tokens are computed."""
    return min(MAX_WAIT_S, max(MIN_WAIT_S, 2 * tokens * compute_s_per_token))


# ---- pairs that rest -----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Late:
    in_a_row: int = 0
    rest_s: float = FIRST_REST_S / 2
    rests_until: float = 0.0
    on_trial: bool = False


class LatePairs:
    """Pairs of a prefill and a decode worker between which no KV comes, though both are heard: a firewall, a cut link.
    Times are seconds of a clock that never goes back.

    Each prompt that is sent there waits for seconds, and the blocks that its decode worker has reserved for it stay so
    for longer; or its KV is refused, and it is computed twice. So a pair rests after a few such ones in a row, ever
    longer, and then one prompt tries it.
    """

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
