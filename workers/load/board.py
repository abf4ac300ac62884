"""The board of a group that steps together: memory in which each rank on a host says at each step what it computes.

Each rank writes its own row and reads all. From the rows a rank gets the prompt tokens that it computes next
(`policy.choices.ranks`), and the first rank's worker what the steps' balance was. A group on several hosts
has none. One whose rows are not all written is neither levelled nor measured.

Ranks begin a step at the same time, so none can wait for what another is about to write. Each writes, when it begins
step n, its plan for step n + ahead: what it will have by then. `ahead` is how many steps its engine has begun at most
without the end of the first of them, 1 or, where it schedules asynchronously, more. None ends a step that another has
not begun. So who begins a step finds the plans of all ranks for it, and all find the same level; and the newest plan
of anybody is less than 2 * ahead steps later. A rank that has no plan for this step, since the group has just begun to
step or that rank has begun again, has none for any other: all compute whole prompts. What has come to a rank since it
wrote its plan counts `ahead` steps later.

What steps take each rank learns from the rows alone, of steps that all have ended: so all come to the same figures.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import tempfile
from pathlib import Path

from msgspec.structs import astuple

from orchestrator.policy.choices.ranks import ChunkWorth, level, pace
from orchestrator.process.files import check_own, make_folder, open_own, own_uid
from orchestrator.types import StepCounters

log = logging.getLogger("pd.worker")

_HERE = "PD_RANK_BOARD"  # of the rank of this process: its number, how many there are, 1 if it levels, the file
_FOLDER = "VLLM_RPC_BASE_PATH"  # of the launcher's run, for short-lived files
# A row: 8-byte integers, a ring of the latest plans, then rings of the latest steps: tokens, microseconds, and those of
# the tokens that are of prompts.
_WAVES, _STEPS, _PLANS = range(3)
_PLAN = 4  # which step it is for; tokens to decode, and of prompts; the fewest of these to compute
_KEPT = 32  # plans, of steps up to half as many ahead
_RINGS = _PLANS + _KEPT * _PLAN
_RING = 1024  # more steps than pass between two looks
_RECENT = 1 - 1 / 512  # weight of a step beside the next one, in the balance of the latest
_ROW = _RINGS + 3 * _RING


def announce(name: str, rank: int, size: int, levels: bool) -> None:
    """Make the row of this process's rank, on the board of its group's name, and name it to the processes that this one
    starts. `levels`: the ranks' prompts are cut into level chunks. Where there can be no file there is no board.
    `name`: its unit's, and a number of this attempt. The boards of attempts before, whose first rank was killed, go."""
    try:
        path = _folder() / f"board-{name}"
        unit = path.name.rpartition("-")[0]
        for old in path.parent.glob("board-*") if rank == 0 else ():
            if old.name.rpartition("-")[0] == unit and old != path:
                old.unlink(missing_ok=True)
        with open_own(path, "a+b") as file:
            os.truncate(file.fileno(), size * _ROW * 8)
            os.posix_fallocate(file.fileno(), 0, size * _ROW * 8)  # on a full disk an error now, not a signal later
            with mmap.mmap(file.fileno(), size * _ROW * 8) as memory:  # an earlier group may have left its own
                memory[rank * _ROW * 8 : (rank + 1) * _ROW * 8] = bytes(_ROW * 8)
    except OSError as error:
        log.warning("the ranks of this group are not levelled, and their balance is not measured: %s", error)
        return
    os.environ[_HERE] = f"{rank},{size},{int(levels)},{path}"


def withdraw() -> None:
    """The group ends, or does not start: the first rank removes the file, for processes that never opened it."""
    if (announced := os.environ.get(_HERE, "")).startswith("0,"):
        with contextlib.suppress(OSError):
            Path(announced.split(",", 3)[3]).unlink(missing_ok=True)


def _folder() -> Path:
    """Of the launcher's run, which removes it; else of this user. Raises OSError."""
    with contextlib.suppress(KeyError, OSError):
        check_own(of_launcher := Path(os.environ[_FOLDER]))
        return of_launcher
    make_folder(own := Path(tempfile.gettempdir(), f"pd-boards-{own_uid()}"))
    return own


class Board:
    """`budget` before each step, `plan` once its batch is known, `note` after it; `counters` at any time."""

    @classmethod
    def here(cls, ahead: int = 1, each: int = 1) -> Board | None:
        """The board of this process's rank; None where it has none, or not any more. `ahead`: the steps that its engine
        begins before the first of them has ended. `each`: the tokens that a sequence decodes in a step."""
        if not (announced := os.environ.get(_HERE)):
            return None
        rank, size, levels, path = announced.split(",", 3)
        try:
            return cls(Path(path), int(rank), int(size), levels == "1" and 2 * ahead <= _KEPT, ahead, each)
        except OSError as error:
            log.warning("this rank is not levelled: %s", error)
            return None

    @classmethod
    def to_measure(cls) -> Board | None:
        """The board that the first rank's worker reads, which removes its file once all engines have it; None in the
        workers of other ranks, which may start later."""
        return cls.here() if os.environ.get(_HERE, "").startswith("0,") else None

    def __init__(self, path: Path, rank: int, size: int, levels: bool, ahead: int, each: int) -> None:
        self._path, self._rank, self._levels, self._ahead, self._each = path, rank, levels, ahead, each
        with open_own(path, "r+b") as file:
            cells = memoryview(mmap.mmap(file.fileno(), size * _ROW * 8)).cast("q")
        self._rows = [cells[at * _ROW : (at + 1) * _ROW] for at in range(size)]
        self._own = self._rows[rank]
        self._steps_left = self._read = 0
        self._worth = ChunkWorth(size, each)
        self._counters = StepCounters(0, 0.0, 0, 0.0, 0.0, 0, 0)
        self._recent = [0.0, 0.0]  # mean and most tokens of the latest steps

    def budget(self, generating: int, backlog: int, max_tokens: int) -> int | None:
        """Prompt tokens to compute in this step, of a rank with so many tokens to decode, and of prompts; None: as
        many as fit, as where no rank had anything to do when it told of this step."""
        decodes, prompts, floors = zip(*plans, strict=True) if (plans := self._plans()) else ((), (), ())
        if not (self._levels and backlog and (any(decodes) or any(prompts))):
            return None
        chunk = max(level(decodes, prompts, floors, max_tokens) - generating, self._worth.tokens(sum(decodes)))
        return max(1, min(backlog, chunk, max_tokens - generating))

    def plan(self, generating: int, backlog: int, full: bool) -> None:
        """What this rank has after the step that it is about to take, before it does. `full`: it has a request in every
        place of its batch."""
        decodes = [decode for rank, (decode, _, _) in enumerate(self._plans()) if rank != self._rank] + [generating]
        worth = self._worth.tokens(sum(decodes))
        floor, self._steps_left = pace(backlog, decodes, full, self._steps_left, worth, self._each)
        step = self._own[_STEPS] + self._ahead
        at = _PLANS + step % _KEPT * _PLAN
        self._own[at + 1], self._own[at + 2], self._own[at + 3] = generating, backlog, floor
        self._own[at] = step  # last: who reads it has the rest

    def _plans(self) -> list[tuple[int, int, int]]:
        """Of all ranks, for this step; none if one has none."""
        step = self._own[_STEPS]
        at = _PLANS + step % _KEPT * _PLAN
        if any(row[at] != step for row in self._rows):
            return []
        return [(row[at + 1], row[at + 2], row[at + 3]) for row in self._rows]

    def note(self, tokens: int, seconds: float, waves: int, prompts: int = 0) -> None:
        """A step has ended, in which this rank computed so many tokens, 0 for an empty batch, of them so many of
        prompts; `waves` have begun. Of steps that were begun ahead it is the latest one that has begun."""
        own = self._own
        at = _RINGS + own[_STEPS] % _RING
        own[at], own[at + _RING], own[at + 2 * _RING], own[_WAVES] = tokens, int(seconds * 1e6), prompts, waves
        own[_STEPS] += 1
        if self._levels:
            self._learn(own[_STEPS] - 1 - self._ahead)

    def _learn(self, ended: int) -> None:
        """What the step took that was the latest to begin `ahead` steps ago: all ranks have told of it."""
        began = ended - self._ahead + 1  # of those that were begun ahead the first one has ended
        if began < 0 or any(row[_STEPS] <= ended for row in self._rows):
            return
        at, took_s = _RINGS + began % _RING, max(row[_RINGS + _RING + ended % _RING] for row in self._rows) / 1e6
        prompts = [row[at + 2 * _RING] for row in self._rows]
        decodes = [row[at] - prompt for row, prompt in zip(self._rows, prompts, strict=True)]
        if any(decodes) or any(prompts):
            self._worth.ended(decodes, prompts, took_s)

    def counters(self) -> StepCounters | None:
        """Of all steps that every rank has taken so far. None on all ranks but the first, and before the first step."""
        reached = min(row[_STEPS] for row in self._rows)
        if self._rank or not reached:
            return None
        self._path.unlink(missing_ok=True)  # all ranks have it
        steps, means, mosts, recent, lost_s, dummies, _ = astuple(self._counters)
        for step in range(max(self._read, reached - _RING // 2), reached):
            at = _RINGS + step % _RING
            tokens = [row[at] for row in self._rows]
            dummies += tokens.count(0)
            if most := max(tokens):
                mean = sum(tokens) / len(tokens)
                steps, means, mosts = steps + 1, means + mean, mosts + most
                lost_s += (1 - mean / most) * max(row[at + _RING] for row in self._rows) / 1e6
                self._recent = [before * _RECENT + now for before, now in zip(self._recent, (mean, most), strict=True)]
                recent = self._recent[0] / self._recent[1]
        self._read = reached
        self._counters = StepCounters(steps, means, mosts, recent, lost_s, dummies, self._own[_WAVES])
        return self._counters
