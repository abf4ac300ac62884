"""The actions that the two state machines ask for: plain data.

`PushWorker` carries them out, and so do the simulated engine and the tests' fake NIXL.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from connectors.push.wire import Endpoint, Message, Register


@dataclass(frozen=True)
class Connect:
    """Make `engine` reachable; answered by `connected` or `unreachable`."""

    peer: Endpoint


@dataclass(frozen=True)
class Send:
    """Send to one peer (an agent name) of `engine`."""

    engine: str
    peer: str
    message: Message


@dataclass(frozen=True)
class Cut:
    """See to it that `engine`, which does not answer, cannot write here; answered by `cut_off` for `requests`, or asked
    again. `settled`: whether it posts nothing for them any more, and what it has posted had `timeout_s` to end.
    """

    engine: str
    requests: tuple[str, ...]
    settled: bool


@dataclass(frozen=True)
class Finish:
    """Tell the decode scheduler that the KV is here. With `ok` false it must compute it, and `why` says why not."""

    request: str
    ok: bool
    why: str = ""


@dataclass(frozen=True)
class Chunk:
    """Blocks whose KV is computed: logical ids per KV cache group, from block `start` of the request.

    `layer` is None for all layers, else one of `Outbound.layers`. `ready` is the CUDA event after which the blocks
    hold their KV; None means that they do already.
    """

    start: int
    blocks: tuple[tuple[int, ...], ...]
    layer: int | None = None
    ready: Any = None
    whole: bool = False  # all that decode needs, in groups that block positions do not describe


@dataclass(frozen=True)
class Post:
    """WRITE these chunks to the registration; answered by `posted` for each handle, or by `failed`."""

    stream: str
    order: Register
    chunks: tuple[Chunk, ...]
    total_blocks: int


@dataclass(frozen=True)
class Tell:
    """Send to every peer of the decode engine, or to `peer` alone. Without a connection there is nothing to do."""

    engine: str
    message: Message
    peer: str | None = None


@dataclass(frozen=True)
class Release:
    """The scheduler may free this request's blocks."""

    stream: str


@dataclass(frozen=True)
class Abandon:
    """Let go of WRITEs to a dead engine."""

    engine: str
    handles: tuple[Any, ...]


@dataclass(frozen=True)
class Ended:
    """For the statistics: `seconds` from the first WRITE to the last, `exposed` from the last chunk to landing."""

    stream: str
    ok: bool
    seconds: float
    exposed: float
    why: str
