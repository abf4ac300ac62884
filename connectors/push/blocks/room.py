"""Whose blocks make room in a prefill engine. A pure rule over its streams.

Decode keeps blocks for a prompt from the moment its job is claimed. Where prefill has no room for that prompt, because
of the KV of others that decode has no room for, both would wait until a lease ends.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Container

from connectors.push.records import PushStream
from connectors.push.states import Stream

YIELD_S = 1.0  # a prompt may wait so long for another reason: a step, or a lease that is about to be taken up
_AWAITED = (Stream.EXPECTED, Stream.STREAMING)  # decode has registered, and the prompt is not computed


def in_the_way(
    streams: Collection[PushStream], unbegun: Container[str], stepped_at: float, now: float
) -> PushStream | None:
    """Of one rank: what has been leased longest, where decode has kept blocks for a second for a prompt that finds no
    room here, and nothing is computed, whose end would leave some. `unbegun`: prefills that the engine has, and has not
    scheduled yet. `stepped_at`: of the engine's last step; one that is paused takes none."""
    if now > stepped_at + YIELD_S:
        return None
    waits_since = math.inf
    for it in streams:
        if it.lost_at is None and it.computing:
            return None
        if it.state in _AWAITED and (it.lost_at is not None or it.key in unbegun):
            waits_since = min(waits_since, it.registered_at if it.lost_at is None else it.lost_at)
    leased = [(it.closed_at, it.key, it) for it in streams if it.state is Stream.LEASED and it.closed_at is not None]
    since, _, longest = min(leased, default=(math.inf, "", None))
    return longest if now >= max(since, waits_since) + YIELD_S else None
