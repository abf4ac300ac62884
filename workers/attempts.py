"""The attempts that one worker holds, prefilling or decoding, and how much of their prompts is left. No I/O.

An attempt is held from its submission or claim until its end was told to its frontend; its KV may live longer in the
engine. At most one attempt of a request is held in each phase.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from dataclasses import dataclass, field

from workers.engine import Phase

# An engine frees what nobody fetches by itself, in bounded time; this many are freed sooner when aborted.
MAX_PUSHING = 1024


@dataclass(slots=True, eq=False)
class Attempt:
    """One attempt at one request. `tokens` are to be computed here: none of a prompt whose KV is received."""

    key: str  # what the engine knows it by
    request_id: str
    number: int
    frontend_id: str
    phase: Phase
    tokens: int
    since: float  # monotonic seconds
    computed: bool = False  # its first output has been seen
    submitted: bool = False  # the engine knows it
    leased: bool = False  # a claim in the queue stands behind it
    trial_until: float = 0.0  # monotonic seconds; see `Submit.trial_s`
    suspect: bool = False
    tokens_left: int = field(init=False, default=0)  # of its prompt, not computed yet; kept by `Attempts`
    chunk_ends: list[float] = field(init=False, default_factory=list)  # monotonic seconds; of all chunks but the last


class Attempts:
    """`pushing` remembers prefills that ended here lately: their KV may still wait in the engine to be fetched."""

    def __init__(self) -> None:
        self._by_key: dict[str, Attempt] = {}
        self._by_request: dict[tuple[Phase, str], Attempt] = {}
        self._prefills: dict[str, Attempt] = {}
        self._pushing: OrderedDict[str, Attempt] = OrderedDict()
        self._tokens_left: Counter[Phase] = Counter()  # sums of the attempts'
        self.room = asyncio.Event()  # set whenever less is held or left to compute; cleared by who waits for it

    def __len__(self) -> int:
        return len(self._by_key)

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens of all attempts that are not computed yet."""
        return self._tokens_left.total()

    @property
    def claimed_tokens(self) -> int:
        """The same, of prefills."""
        return self._tokens_left[Phase.PREFILL]

    def get(self, key: str) -> Attempt | None:
        return self._by_key.get(key)

    def find(self, phase: Phase, request_id: str) -> Attempt | None:
        return self._by_request.get((phase, request_id))

    def holds(self, attempt: Attempt) -> bool:
        """False once it was removed, even when the key came back."""
        return self._by_key.get(attempt.key) is attempt

    def all(self) -> list[Attempt]:
        return list(self._by_key.values())

    def prefills(self) -> list[Attempt]:
        return list(self._prefills.values())

    @property
    def prefill_count(self) -> int:
        return len(self._prefills)

    def frontends(self) -> set[str]:
        return {attempt.frontend_id for attempt in self._by_key.values()}

    def unproven_of_others(self, frontend_id: str) -> int:
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
        self._leave(attempt, attempt.tokens)

    def computing(self, tokens_left: dict[str, int], now: float) -> None:
        """What the engine says of prompts that it has begun, by key: tokens that it still has to compute. `now`:
        monotonic seconds."""
        for key, tokens in tokens_left.items():
            attempt = self._by_key.get(key)
            if attempt is not None and not attempt.computed:
                if tokens < attempt.tokens_left:
                    attempt.chunk_ends.append(now)
                self._leave(attempt, tokens)
                self.room.set()

    def compute(self, attempt: Attempt) -> None:
        """Its prompt has been computed. Idempotent."""
        attempt.computed = True
        self._leave(attempt, 0)
        self.room.set()

    def remove(self, attempt: Attempt) -> None:
        """Idempotent."""
        if not self.holds(attempt):
            return
        self._leave(attempt, 0)
        del self._by_key[attempt.key]
        self._prefills.pop(attempt.key, None)
        if self._by_request.get((attempt.phase, attempt.request_id)) is attempt:
            del self._by_request[attempt.phase, attempt.request_id]
        self.room.set()

    def _leave(self, attempt: Attempt, tokens_left: int) -> None:
        self._tokens_left[attempt.phase] += tokens_left - attempt.tokens_left
        attempt.tokens_left = tokens_left

    # ---- KV that outlives its attempt --------------------------------------------------------------------------

    @property
    def pushes(self) -> bool:
        """KV may go out of here, to an engine that only ours knows."""
        return bool(self._prefills or self._pushing)

    def pushed(self) -> None:
        """The engine holds nothing any more."""
        self._pushing.clear()

    def note_pushing(self, attempt: Attempt) -> None:
        """Its prefill has ended well."""
        self._pushing[attempt.request_id] = attempt
        if len(self._pushing) > MAX_PUSHING:
            self._pushing.popitem(last=False)

    def end_pushing(self, request_id: str, number: int) -> list[str]:
        """Engine keys of this attempt, or an older one, whose KV is not wanted any more."""
        attempt = self._pushing.get(request_id)
        if attempt is None or attempt.number > number:
            return []
        del self._pushing[request_id]
        return [attempt.key]

    def end_pushing_to(self, frontend_id: str) -> list[str]:
        """The same, of all requests of one frontend."""
        ended = [attempt for attempt in self._pushing.values() if attempt.frontend_id == frontend_id]
        return [key for attempt in ended for key in self.end_pushing(attempt.request_id, attempt.number)]
