"""The attempts of one worker, prefilling or decoding, and how many of their prompt tokens are uncomputed. No I/O.

An attempt is held from its submission or claim until its frontend has been told of its end. Its KV may stay longer in
the engine. At most one attempt of a request is held per phase.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, OrderedDict
from dataclasses import dataclass, field

from workers.engine import Phase

# How many ended prefills are remembered, so that an abort can free their KV. The engine frees KV that is not fetched by
# itself, in bounded time.
MAX_PUSHING = 1024
NOT_GIVEN = math.inf  # it waits for an adapter or a fetched prefix


@dataclass(slots=True, eq=False)
class Attempt:
    """One attempt at one request. `tokens`: prompt tokens to compute here, 0 for a prompt whose KV is received."""

    key: str  # its id in the engine
    request_id: str
    number: int
    frontend_id: str
    phase: Phase
    tokens: int
    since: float  # monotonic seconds
    computed: bool = False  # it has produced its first output
    submitted: bool = False  # the engine knows it
    leased: bool = False  # it has a lease in the queue
    trial_until: float = 0.0  # monotonic seconds; see `Submit.trial_s`
    suspect: bool = False
    blocks: int = 0  # of KV, that it will need at least; of decodes
    tokens_left: int = field(init=False, default=0)  # of its prompt, not computed yet; kept by `Attempts`
    chunk_ends: list[float] = field(init=False, default_factory=list)  # monotonic seconds; of all chunks but the last


class Attempts:
    """All attempts of the worker. `_pushing` has prefills that ended lately, whose KV may still be in the engine."""

    def __init__(self) -> None:
        self._by_key: dict[str, Attempt] = {}
        self._by_request: dict[tuple[Phase, str], Attempt] = {}
        self._prefills: dict[str, Attempt] = {}
        self._pushing: OrderedDict[str, Attempt] = OrderedDict()
        self.lends = False  # the engine may be sending a prefix from its cache
        self.sources: set[str] = set()  # engines that may push KV to this one
        self._tokens_left: Counter[Phase] = Counter()  # sums over the attempts
        # Decodes that the engine's figures do not include yet -> how many steps had ended when it was given them.
        self.unsettled: dict[Attempt, float] = {}
        self.room = asyncio.Event()  # set when attempts or tokens get fewer; cleared by the waiting task

    def __len__(self) -> int:
        return len(self._by_key)

    @property
    def waiting_tokens(self) -> int:
        """Uncomputed prompt tokens of all attempts."""
        return self._tokens_left.total()

    @property
    def claimed_tokens(self) -> int:
        """Uncomputed prompt tokens of prefills."""
        return self._tokens_left[Phase.PREFILL]

    def get(self, key: str) -> Attempt | None:
        return self._by_key.get(key)

    def find(self, phase: Phase, request_id: str) -> Attempt | None:
        return self._by_request.get((phase, request_id))

    def holds(self, attempt: Attempt) -> bool:
        """Whether it has not been removed. False also if another attempt has the same key now."""
        return self._by_key.get(attempt.key) is attempt

    def all(self) -> list[Attempt]:
        return list(self._by_key.values())

    def prefills(self) -> list[Attempt]:
        return list(self._prefills.values())

    @property
    def prefill_count(self) -> int:
        return len(self._prefills)

    @property
    def decode_count(self) -> int:
        return len(self._by_key) - len(self._prefills)

    def frontends(self) -> set[str]:
        return {attempt.frontend_id for attempt in self._by_key.values()}

    def others_without_output(self, frontend_id: str) -> int:
        """How many attempts of other frontends have no output yet."""
        return sum(attempt.frontend_id != frontend_id and not attempt.computed for attempt in self._by_key.values())

    def on_trial(self) -> list[Attempt]:
        """Attempts at requests whose last engine crashed, without an output from this engine yet."""
        return [attempt for attempt in self._by_key.values() if attempt.trial_until and not attempt.computed]

    def add(self, attempt: Attempt) -> None:
        """Raises ValueError for a key that is held."""
        if attempt.key in self._by_key:
            raise ValueError(f"{attempt.key} is held already")
        self._by_key[attempt.key] = attempt
        self._by_request[attempt.phase, attempt.request_id] = attempt
        if attempt.phase is Phase.PREFILL:
            self._prefills[attempt.key] = attempt
        else:
            self.unsettled[attempt] = NOT_GIVEN
        self._leave(attempt, attempt.tokens)

    def computing(self, tokens_left: dict[str, int], now: float) -> None:
        """Update the uncomputed tokens of prompts that the engine has begun, by key: the figures of its step include
        them. `now`: monotonic seconds."""
        for key, tokens in tokens_left.items():
            attempt = self._by_key.get(key)
            if attempt is not None and not attempt.computed:
                self.settle(attempt)
                if tokens < attempt.tokens_left:
                    attempt.chunk_ends.append(now)
                self._leave(attempt, tokens)
                self.room.set()

    def mark_computed(self, attempt: Attempt) -> None:
        """Mark its prompt as computed. Idempotent."""
        attempt.computed = True
        self.settle(attempt)
        self._leave(attempt, 0)
        self.room.set()

    def remove(self, attempt: Attempt) -> None:
        """Idempotent."""
        if not self.holds(attempt):
            return
        self._leave(attempt, 0)
        self.settle(attempt)
        del self._by_key[attempt.key]
        self._prefills.pop(attempt.key, None)
        if self._by_request.get((attempt.phase, attempt.request_id)) is attempt:
            del self._by_request[attempt.phase, attempt.request_id]
        self.room.set()

    def settle(self, *settled: Attempt) -> None:
        """The engine's figures include these, or they have ended. Idempotent."""
        for attempt in settled:
            self.unsettled.pop(attempt, None)

    def _leave(self, attempt: Attempt, tokens_left: int) -> None:
        self._tokens_left[attempt.phase] += tokens_left - attempt.tokens_left
        attempt.tokens_left = tokens_left

    # ---- KV that outlives its attempt --------------------------------------------------------------------------

    @property
    def pushes(self) -> bool:
        """Whether the engine may be pushing KV, to engines that only it knows."""
        return bool(self._prefills or self._pushing or self.lends)

    def exchanges_none(self) -> None:
        """Forget all ended prefills, and who pushes KV here: the engine holds no KV any more."""
        self._pushing.clear()
        self.sources.clear()
        self.lends = False

    def note_pushing(self, attempt: Attempt) -> None:
        """Remember a prefill that has ended well."""
        self._pushing[attempt.request_id] = attempt
        if len(self._pushing) > MAX_PUSHING:
            self._pushing.popitem(last=False)

    def was_prefilled(self, request_id: str, key: str) -> bool:
        """Whether an attempt of this key has ended well, so that its KV and its key may still be in the engine."""
        ended = self._pushing.get(request_id)
        return ended is not None and ended.key == key

    def end_pushing(self, frontend_id: str, request_id: str, number: int) -> list[str]:
        """Forget the prefill of this attempt of a frontend's request, or of an older one, and return its engine key for
        an abort."""
        attempt = self._pushing.get(request_id)
        if attempt is None or attempt.number > number or attempt.frontend_id != frontend_id:
            return []
        del self._pushing[request_id]
        return [attempt.key]

    def end_pushing_to(self, frontend_id: str) -> list[str]:
        """The same for all requests of one frontend."""
        ended = [attempt for attempt in self._pushing.values() if attempt.frontend_id == frontend_id]
        return [key for attempt in ended for key in self.end_pushing(frontend_id, attempt.request_id, attempt.number)]
