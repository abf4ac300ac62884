"""How many workers should prefill and how many decode: rate matching over a window of measured loads.

Pure: a window of samples and the state of the last change in, a desired xPyD out. Applying it (role flips first,
then starting and draining processes) is the launcher's business.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from orchestrator.types import DesiredRatio


class LoadSample(msgspec.Struct, frozen=True):
    """The fleet over one sampling period. Offered load is what arrived, whether or not it was served or rejected."""

    at: float  # unix seconds, end of the period
    period_s: float
    offered_requests: int
    offered_prefill_tokens: int  # uncached prompt tokens that arrived
    offered_output_tokens: float  # predicted for what arrived
    queued_prefill_tokens: int  # waiting now
    decode_held: float  # decode workers that the sequences now decoding, or waiting to, would keep full
    prefill_s_per_token: float  # measured on a prefill worker
    decode_tokens_per_s: float  # of one worker, as full as memory and the TPOT objective allow


class RatioLimits(msgspec.Struct, frozen=True):
    """`gain` is the least relative improvement of the busier side worth a change (hysteresis), and nothing is changed
    while that side is less than `busy`.

    `decode_load` is how busy a decode side may be left that gives workers away, and at `prefill_load` a prefill side
    that gives some to a busier decode side counts as full. Where prompts can be prefilled on decode workers (`cost`
    placement) less and more than 1: prefill overflows to decode, but decode cannot overflow to prefill.
    """

    min_prefill: int = 1
    min_decode: int = 1
    cool_down_s: float = 60.0
    gain: float = 0.15
    busy: float = 0.7
    decode_load: float = 1.0
    prefill_load: float = 1.0
    max_step: int = 0  # workers changed at once; 0: an eighth of the fleet, at least one
    backlog_s: float = 30.0  # a backlog is to be worked off within this


class Demand(msgspec.Struct, frozen=True):
    """Workers kept busy by the offered load, on each side."""

    prefill: float
    decode: float


def demand(window: Sequence[LoadSample], limits: RatioLimits = RatioLimits()) -> Demand:
    """P = rate * prefill time, D = rate * output tokens / decode rate (NVIDIA's rate matching, by offered load).

    With TTFT one prefill's service time, OSL output tokens and C_dec sequences a decode worker holds at TPOT, this is
    P/D = C_dec * TTFT / (OSL * TPOT). Backlogs count as load to be worked off within `limits.backlog_s`.
    """
    seconds = sum(sample.period_s for sample in window)
    if not window or seconds <= 0:
        return Demand(0.0, 0.0)
    last = window[-1]
    prefill_tokens_per_s = sum(sample.offered_prefill_tokens for sample in window) / seconds
    output_tokens_per_s = sum(sample.offered_output_tokens for sample in window) / seconds
    backlog = last.queued_prefill_tokens / limits.backlog_s
    offered = output_tokens_per_s / last.decode_tokens_per_s if last.decode_tokens_per_s > 0 else 0.0
    # Outputs are only known once they end, the long ones last: what decodes now bounds a rate guessed too low.
    held = sum(sample.decode_held * sample.period_s for sample in window) / seconds
    return Demand(
        prefill=(prefill_tokens_per_s + backlog) * last.prefill_s_per_token,
        decode=max(offered, held),
    )


def desired_ratio(
    window: Sequence[LoadSample],
    current: DesiredRatio,
    limits: RatioLimits = RatioLimits(),
) -> DesiredRatio | None:
    """A better split of the same number of workers, or None to leave it: nothing offered, cooling down, or no gain."""
    total = current.prefill + current.decode
    if not window or total < limits.min_prefill + limits.min_decode:
        return None
    now = window[-1].at
    if now - current.set_at < limits.cool_down_s:
        return None
    # Both halves of the window must ask for the same: a burst, or its backlog, is no reason to move.
    middle = len(window) // 2
    wanted = [_best(part, current, limits) for part in (window, window[:middle], window[middle:]) if part]
    best = wanted[0]
    if best == current.prefill or any((want > current.prefill) != (best > current.prefill) for want in wanted):
        return None
    if any(want == current.prefill for want in wanted):
        return None
    step = limits.max_step or max(1, total // 8)
    prefill = max(current.prefill - step, min(current.prefill + step, best))
    if prefill == current.prefill:
        return None
    return DesiredRatio(prefill, total - prefill, set_by="ratio", set_at=now)


def _best(window: Sequence[LoadSample], current: DesiredRatio, limits: RatioLimits) -> int:
    """The number of prefill workers that keeps the busier side least busy; the current one unless that is a gain."""
    total = current.prefill + current.decode
    need = demand(window, limits)
    if need.prefill + need.decode <= 0:
        return current.prefill
    decode_is_busier = need.decode * current.prefill > need.prefill * current.decode

    def busiest(prefill: int) -> float:
        decode = total - prefill
        if not prefill or not decode:
            return float("inf")
        full = limits.prefill_load if decode_is_busier and prefill < current.prefill else 1.0
        return max(need.prefill / (prefill * full), need.decode / decode)

    if busiest(current.prefill) < limits.busy:
        return current.prefill
    options = [
        prefill
        for prefill in range(limits.min_prefill, total - limits.min_decode + 1)
        if prefill <= current.prefill or need.decode <= limits.decode_load * (total - prefill)
    ]
    if not options:
        return current.prefill
    best = min(options, key=lambda prefill: (busiest(prefill), abs(prefill - current.prefill)))
    return best if busiest(best) <= (1 - limits.gain) * busiest(current.prefill) else current.prefill
