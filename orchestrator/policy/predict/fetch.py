"""Whether a prompt's first tokens are fetched from another worker's prefix cache, and from which one.

A fetch takes two engine steps and the time that its bytes take over the link. What only the host tier of the holder has
is loaded into its device first, which takes a step more and its bytes' time. It must be worth more than the errors of
these predictions: a fetch that fails has cost its time.
"""

from __future__ import annotations

from collections.abc import Iterable

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
