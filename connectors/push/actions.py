"""The actions that the two state machines return, as plain data.

`PushWorker`, the simulated engine and the tests' fake NIXL carry them out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from connectors.push.wire import Endpoint, Message, Register

NO_BLOCK = 0  # vLLM's null block stands for one outside of a window: nobody reads it


@dataclass(frozen=True)
class Connect:
    """Make `engine` reachable; answered by `connected` or `unreachable`."""

    peer: Endpoint


@dataclass(frozen=True)
class Renew:
    """Drop the connection to `engine`, which is dead for reason `why`, and make another one."""

    engine: str
    why: str


@dataclass(frozen=True)
class Send:
    """Send to one peer (an agent name) of `engine`."""

    engine: str
    peer: str
    message: Message


@dataclass(frozen=True)
class Cut:
    """Make sure that `engine`, which does not answer or whose WRITEs failed, cannot write here for `requests`. Answered
    by `cut_off`; asked again otherwise. `settled`: it posts no more WRITEs for them, and its posted ones had
    `timeout_s` to end. `answered`: it posts no more, it runs, and it has dropped its end of the connection on which
    WRITEs failed. `epochs`: the connections, by peer, that were known before this was carried out.
    """

    engine: str
    requests: tuple[str, ...]
    settled: bool
    answered: bool = False
    epochs: frozenset[tuple[str, int]] = frozenset()


@dataclass(frozen=True)
class Finish:
    """Tell the decode scheduler that the KV has arrived; with `ok` false, to compute the prompt, for reason `why`."""

    request: str
    ok: bool
    why: str = ""


@dataclass(frozen=True)
class Chunk:
    """Blocks whose KV is computed: logical ids per KV cache group, from block `start` of the request. Each group has as
    many; those that its window drops are NO_BLOCK.

    `regions` are those of NIXL that go out, of the `Outbound.regions` in which a block has its layers; None for all.
    `ready` is the CUDA event after which the blocks hold their KV there; None if they hold it already.
    """

    start: int
    blocks: tuple[tuple[int, ...], ...]
    regions: tuple[int, ...] | None = None
    ready: Any = None
    whole: bool = False  # the blocks of a whole prompt, for groups whose blocks have no position

    def pieces(self, blocks: int) -> list[Chunk]:
        """In order, of at most so many blocks each."""
        starts = range(0, len(self.blocks[0]), blocks)
        return [
            replace(self, start=self.start + at, blocks=tuple(group[at : at + blocks] for group in self.blocks))
            for at in starts
        ]


@dataclass(frozen=True)
class Post:
    """WRITE these chunks to the registration; answered by `posted` for each handle, or by `failed`."""

    stream: str
    order: Register
    chunks: tuple[Chunk, ...]
    total_blocks: int


@dataclass(frozen=True)
class Tell:
    """Send to every peer of the decode engine, or to `peer` only. Without a connection nothing is sent."""

    engine: str
    message: Message
    peer: str | None = None


@dataclass(frozen=True)
class Release:
    """The scheduler may free this request's blocks."""

    stream: str


@dataclass(frozen=True)
class Ended:
    """Statistics of an ended stream: `seconds` from its first WRITE to its last, `exposed` from its last chunk to
    landing."""

    stream: str
    ok: bool
    seconds: float
    exposed: float
    why: str
