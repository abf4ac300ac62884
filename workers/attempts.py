"""The attempts that one worker holds, prefilling or decoding, and what they sum up to. No I/O.

An attempt is held from its submission or claim until its end was told to its frontend; its KV may live longer in the
engine. At most one attempt of a request is held in each phase.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass

from workers.engine import Phase

# An engine frees what nobody fetches by itself, in bounded time; this many are freed sooner when aborted.
MAX_PUSHING = 4096


@dataclass(slots=True, eq=False)
class Held:
    """One attempt. `tokens` are to be computed here: none of a prompt whose KV is received."""

    key: str
    request_id: str
    attempt: int
    frontend_id: str
    phase: Phase
    tokens: int
    since: float  # monotonic seconds
    computed: bool = False  # its first output has been seen
    submitted: bool = False  # the engine knows it
    leased: bool = False  # a claim in the queue stands behind it


class Attempts:
    """`pushing` remembers prefills that ended here lately: their KV may still wait in the engine to be fetched."""

    def __init__(self) -> None:
        self._by_key: dict[str, Held] = {}
        self._by_request: dict[tuple[Phase, str], Held] = {}
        self._claimed: dict[str, Held] = {}
        self._pushing: OrderedDict[str, Held] = OrderedDict()
        self._tokens = 0  # of all attempts whose prompt has not been computed
        self._prefill_tokens = 0  # the same, of prefills
        self._partial_tokens = 0  # of those, computed already: chunks of a prompt that goes on
        self._completed = False  # some prompt, since the last step was accounted for
        self._owed_tokens = 0  # of what was completed, computed in the step to be accounted for
        self.changed = asyncio.Event()  # set whenever something is removed; cleared by who waits for it

    def __len__(self) -> int:
        return len(self._by_key)

    @property
    def waiting_tokens(self) -> int:
        """Of all attempts, not yet computed."""
        return max(0, self._tokens - self._partial_tokens)

    @property
    def claimed_tokens(self) -> int:
        """Of prefills, not yet computed."""
        return max(0, self._prefill_tokens - self._partial_tokens)

    def get(self, key: str) -> Held | None:
        return self._by_key.get(key)

    def find(self, phase: Phase, request_id: str) -> Held | None:
        return self._by_request.get((phase, request_id))

    def holds(self, held: Held) -> bool:
        """False once it was removed, even when the key came back."""
        return self._by_key.get(held.key) is held

    def claimed(self) -> list[Held]:
        return list(self._claimed.values())

    @property
    def claims(self) -> int:
        return len(self._claimed)

    def all(self) -> list[Held]:
        return list(self._by_key.values())

    def frontends(self) -> set[str]:
        return {held.frontend_id for held in self._by_key.values()}

    def add(self, held: Held) -> None:
        if held.key in self._by_key:
            raise ValueError(f"{held.key} is held already")
        self._by_key[held.key] = held
        self._by_request[held.phase, held.request_id] = held
        self._tokens += held.tokens
        if held.phase is Phase.PREFILL:
            self._claimed[held.key] = held
            self._prefill_tokens += held.tokens

    def compute(self, held: Held) -> None:
        """Its prompt has been computed. Idempotent."""
        if not held.computed:
            before = min(self._partial_tokens, held.tokens)
            self._partial_tokens -= before
            self._owed_tokens += held.tokens - before
            self._completed = True
            self._settle(held)

    def _settle(self, held: Held) -> None:
        held.computed = True
        self._tokens -= held.tokens
        if held.phase is Phase.PREFILL:
            self._prefill_tokens -= held.tokens

    def progress(self, prompt_tokens: int) -> None:
        """A step computed so many; call after `compute` of the attempts that it completed.

        Prompts are computed one after the other, so what a step leaves unfinished, once it finished one, is its own.
        Wrong guesses of what was cached so end with the prompt that they were made of.
        """
        partial = max(0, self._partial_tokens + prompt_tokens - self._owed_tokens)
        most = min(self._tokens, prompt_tokens) if self._completed else self._tokens
        self._partial_tokens = min(partial, most)
        self._completed, self._owed_tokens = False, 0

    def remove(self, held: Held) -> None:
        """Idempotent."""
        if not self.holds(held):
            return
        if not held.computed:
            self._settle(held)
            self._partial_tokens = 0  # it may have been this one's
        del self._by_key[held.key]
        self._claimed.pop(held.key, None)
        if self._by_request.get((held.phase, held.request_id)) is held:
            del self._by_request[held.phase, held.request_id]
        self.changed.set()

    def note_pushing(self, held: Held) -> None:
        """Its prefill has ended well."""
        self._pushing[held.request_id] = held
        if len(self._pushing) > MAX_PUSHING:
            self._pushing.popitem(last=False)

    def end_pushing(self, request_id: str, attempt: int) -> list[str]:
        """Engine keys whose KV is not wanted any more."""
        held = self._pushing.get(request_id)
        if held is None or held.attempt > attempt:
            return []
        del self._pushing[request_id]
        return [held.key]

    def end_pushing_to(self, frontend_id: str) -> list[str]:
        """The same, of all requests of one frontend."""
        ended = [held for held in self._pushing.values() if held.frontend_id == frontend_id]
        return [key for held in ended for key in self.end_pushing(held.request_id, held.attempt)]
