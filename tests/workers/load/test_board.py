"""The board of a group: what each rank may compute next, and what their steps' balance was."""

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.policy.choices.ranks import LEAST_ALONE
from orchestrator.types import StepCounters
from workers.load import board
from workers.load.board import Board, announce, withdraw

SIZE, RANKS = 2, 3


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", str(tmp_path))
    monkeypatch.delenv("PD_RANK_BOARD", raising=False)
    yield tmp_path
    os.environ.pop("PD_RANK_BOARD", None)


def ranks(levels: bool = True) -> list[Board]:
    boards = []
    for rank in range(SIZE):
        announce("n-g-1", rank, SIZE, levels)
        made = Board.here()
        assert made is not None
        boards.append(made)
    return boards


def step(boards: list[Board], *tokens: int, seconds: float = 1.0) -> None:
    for each, computed in zip(boards, tokens, strict=True):
        each.note(computed, seconds, waves=1)


def test_there_is_none_where_none_was_announced(here: Path) -> None:
    assert Board.here() is None


def test_a_folder_that_others_may_write_is_not_used(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared, own = here / "shared", here / "own"
    for folder in (shared, own):
        folder.mkdir()
    shared.chmod(0o777)
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", str(shared))
    monkeypatch.setattr(board.tempfile, "gettempdir", lambda: str(own))
    assert len(ranks()) == SIZE
    assert list(shared.iterdir()) == [] and len(list(own.glob("pd-boards-*/board-*"))) == 1
    monkeypatch.delenv("PD_RANK_BOARD")
    (own / "file").touch()
    monkeypatch.setattr(board.tempfile, "gettempdir", lambda: str(own / "file"))
    announce("n-g-2", 0, SIZE, True)
    assert Board.here() is None, "a worker serves without one"


def plan(boards: list[Board], *work: tuple[int, int]) -> None:
    """What each will decode and has of prompts, after the step that all take then."""
    for each, (generating, backlog) in zip(boards, work, strict=True):
        each.plan(generating, backlog, full=False)
    step(boards, *[1] * SIZE)


def test_a_prompt_is_cut_so_that_ranks_compute_as_many_tokens(here: Path) -> None:
    first, second = boards = ranks()
    plan(boards, (10, 0), (20, 0))
    plan(boards, (10, 160), (20, 0))
    assert second.budget(20, 0, 2048) is None  # it has no prompt
    assert first.budget(10, 160, 2048) == 11  # as many as the other, and one more
    plan(boards, (10, 160), (20, 500))
    assert first.budget(10, 160, 2048) == 160 and second.budget(20, 500, 2048) == 150


def test_ranks_that_begin_a_step_together_find_the_same_level_whichever_is_first(here: Path) -> None:
    """What one writes meanwhile is for the next step."""
    first, second = boards = ranks()
    plan(boards, (10, 0), (12, 0))
    plan(boards, (10, 900), (12, 400))
    found = first.budget(10, 900, 2048)
    first.plan(11, 500, full=False)
    assert found == 402 and second.budget(12, 400, 2048) == 400
    second.plan(13, 0, full=False)
    step(boards, 1, 1)
    assert first.budget(11, 500, 2048) < 100, "the other one has no prompt left"


def test_a_prompt_that_has_just_come_begins_and_is_cut_by_what_all_know(here: Path) -> None:
    first, second = boards = ranks()
    plan(boards, (10, 0), (12, 0))
    assert first.budget(10, 700, 2048) == 3, "nobody else knows of it: what makes the step one token longer"
    plan(boards, (10, 699), (12, 0))
    assert first.budget(10, 699, 2048) > 50
    plan(boards, (10, 0), (12, 300))
    assert first.budget(10, 700, 2048) > 10, "it goes along with the other's"


class Stepping:
    """A rank of a group, of whose calls any order is taken that steps in lockstep allow."""

    def __init__(self, rank: int, ahead: int, chance: random.Random, costs: bool = False) -> None:
        """`costs`: steps with prompts take longer for having any."""
        self._rank, self._ahead, self._chance, self._costs, self.paused = rank, ahead, chance, costs, 0
        self.levels: list[int | None] = []  # in the steps that it has begun
        self.begin()

    def begin(self) -> None:
        announce("n-g-1", self._rank, RANKS, True)
        board = Board.here(self._ahead)
        assert board is not None
        self.board, self._next, self.levels, self.computing = board, self._steps(board), [], 0

    def __next__(self) -> None:
        next(self._next)

    def _steps(self, board: Board) -> Iterator[None]:
        began = [0] * self._ahead  # prompt tokens in the steps that have not ended
        while True:
            # Of prompts without end, beside nothing to decode, it computes what the level is.
            self.levels.append(board.budget(0, 1 << 40, 1 << 40))
            yield
            if self.paused:
                self.paused -= 1
            else:
                board.plan(self._chance.randrange(50), self._chance.choice((0, self._chance.randrange(5000))), False)
            self.computing += 1
            yield
            if self._costs:
                began = [*began[1:], self._chance.choice((0, 0, 0, self._chance.randrange(1000)))]
                board.note(20 + began[-1], 0.02 + 1e-4 * began[0] + 0.05 * (began[0] > 0), 1, began[-1])
            else:
                board.note(1, 1.0, 1)
            yield


@pytest.mark.parametrize("ahead", [1, 2, 4])
@pytest.mark.parametrize("seed", range(20))
def test_in_every_order_of_their_steps_ranks_find_the_same_level_or_none(here: Path, seed: int, ahead: int) -> None:
    chance = random.Random(seed)
    group = [Stepping(rank, ahead, chance) for rank in range(RANKS)]
    for _ in range(1500):
        # A step ends once everybody computes it, and the one that is `ahead` of it begins then.
        ended = min(rank.computing for rank in group)
        free = [rank for rank in group if rank.computing < ended + ahead]
        next(chance.choice(free))
        if chance.random() < 0.01:
            chance.choice(group).paused = chance.randrange(1, 5)  # meanwhile it has no plans
    by_step = [set(levels) for levels in zip(*(rank.levels for rank in group), strict=False)]
    assert all(len(levels) == 1 for levels in by_step), f"other levels in a step: {by_step}"
    found = [level for levels in by_step for level in levels]
    assert set(found[:ahead]) == {None} and len([level for level in found if level]) > len(found) / 2
    # One that begins again alone, as none does whose group is started as one, is counted on by nobody.
    alone, *others = group
    alone.begin()
    then = [len(rank.levels) for rank in others]
    for _ in range(3 * ahead):
        for rank in group:
            next(rank)
    for rank, before in zip(others, then, strict=True):
        assert set(rank.levels[before:]) == {None}
    assert set(alone.levels) == {None}


@pytest.mark.parametrize("ahead", [1, 2, 4])
@pytest.mark.parametrize("seed", range(20))
def test_in_every_order_of_their_steps_ranks_learn_the_same(here: Path, seed: int, ahead: int) -> None:
    chance = random.Random(seed)
    group = [Stepping(rank, ahead, chance, costs=True) for rank in range(RANKS)]
    for _ in range(3000):
        ended = min(rank.computing for rank in group)
        next(chance.choice([rank for rank in group if rank.computing < ended + ahead]))
    by_step = [set(levels) for levels in zip(*(rank.levels for rank in group), strict=False)]
    assert all(len(levels) == 1 for levels in by_step), f"other levels in a step: {by_step}"
    worth = {rank.board._own[board._STEPS]: rank.board._worth.tokens(60) for rank in group}
    assert min(worth.values()) > 0
    while len({rank.computing for rank in group}) > 1 or len({rank.board._own[board._STEPS] for rank in group}) > 1:
        behind = min(group, key=lambda rank: (rank.board._own[board._STEPS], rank.computing))
        next(behind)
    assert len({rank.board._worth.tokens(60) for rank in group}) == 1


def test_a_prompt_is_cut_into_no_less_than_is_worth_a_step(here: Path) -> None:
    """Also one that has just come. Each rank reads what the steps took, and finds the same."""
    first, second = boards = ranks()
    for at in range(60):  # 20 ms; 1 ms more with prompts, and 10 us for each of their tokens
        prompts = 100 * (at % 5) * (at % 2)
        first.note(50 + prompts, 0.02 + 1e-5 * prompts + 0.001 * (prompts > 0), 1, prompts)
        second.note(50, 0.02, 1)
    for each in boards:
        each.plan(50, 0, False)
        each.note(50, 0.02, 1)
    worth = int((0.02 / 100 + 0.001) / (1e-5 / 2))
    assert 200 < worth < 300 and first.budget(50, 1500, 2048) == second.budget(50, 1500, 2048)
    assert first.budget(50, 1500, 2048) == pytest.approx(worth, rel=0.02)
    assert first.budget(50, 200, 2048) == 200 and first.budget(1900, 300, 2048) == 148
    first.plan(50, 1500, False)
    second.plan(50, 0, False)
    step(boards, 50, 50, seconds=0.02)
    assert first.budget(50, 1500, 2048) == pytest.approx(worth, rel=0.02)


def test_where_no_rank_decodes_a_step_is_as_long_as_the_mean_of_what_they_have(here: Path) -> None:
    """A prefill group: the short prompt is done before the long one."""
    first, second = boards = ranks()
    assert first.budget(0, 8000, 8192) is None, "nobody has told of this step"
    plan(boards, (0, 8000), (0, 200))
    assert first.budget(0, 8000, 8192) == 4100 and second.budget(0, 200, 8192) == 200
    plan(boards, (0, 600), (0, 0))
    assert first.budget(0, 600, 8192) == LEAST_ALONE, "a step is worth so many"
    plan(boards, (0, 9000), (0, 12_000))
    assert first.budget(0, 9000, 8192) == second.budget(0, 12_000, 8192) == 8192
    plan(boards, (0, 0), (0, 0))
    assert first.budget(0, 160, 2048) is None


def test_prompts_are_whole_where_the_key_says_so(here: Path) -> None:
    first, _ = boards = ranks(levels=False)
    plan(boards, (10, 160), (20, 0))
    assert first.budget(10, 160, 2048) is None


def test_a_rank_elsewhere_is_not_counted_on(here: Path) -> None:
    first, second = ranks()
    first.plan(10, 160, full=False)
    first.note(5, 1.0, waves=1)
    assert first.budget(10, 160, 2048) is None and first.counters() is None


def test_counters_are_of_the_steps_that_all_ranks_have_taken(here: Path) -> None:
    first, second = boards = ranks()
    assert first.counters() is None
    step(boards, 10, 5, seconds=2.0)
    step(boards, 0, 8, seconds=0.5)
    step(boards, 0, 0)  # nobody has anything: no step to balance
    first.note(3, 1.0, waves=2)
    assert first.counters() == StepCounters(
        2, 7.5 + 4, 18, pytest.approx(11.5 / 18, rel=0.01), 2 * 0.25 + 0.5 * 0.5, 3, 2
    )
    assert second.counters() is None, "the first rank reports them"
    second.note(3, 1.0, waves=2)
    assert (after := first.counters()) is not None and (after.steps, after.mean_tokens, after.most_tokens) == (
        3,
        14.5,
        21,
    )
    assert list(here.iterdir()) == [], "its file is gone once all ranks have it"


def test_file_of_a_group_that_never_stepped_goes_with_the_first_rank(here: Path) -> None:
    ranks()
    withdraw()  # the last one
    assert len(list(here.iterdir())) == 1
    announce("n-g-1", 0, SIZE, True)
    withdraw()
    assert list(here.iterdir()) == []


def test_boards_of_attempts_whose_first_rank_was_killed_go_with_the_next_one(here: Path) -> None:
    """A group that cannot start is tried again and again."""
    announce("n-g-2-40000", 0, SIZE, True)  # another unit's
    for rank in (1, 0):
        announce("n-g-50000", rank, SIZE, True)
    assert len(list(here.iterdir())) == 2
    for rank in (1, 0):
        announce("n-g-50001", rank, SIZE, True)
    assert {file.name for file in here.iterdir()} == {"board-n-g-2-40000", "board-n-g-50001"}


def test_a_step_lasts_as_long_as_on_the_rank_that_worked(here: Path) -> None:
    first, second = ranks()
    first.note(0, 0.0, waves=1)  # an empty batch, which its engine does not wait for
    second.note(8, 2.0, waves=1)
    assert (found := first.counters()) is not None and found.lost_s == 1.0


def test_more_steps_than_the_ring_holds(here: Path) -> None:
    boards = ranks()
    for _ in range(3 * board._RING):
        step(boards, 4, 2)
    found = boards[0].counters()
    assert found is not None and 0 < found.steps < board._RING and found.recent == pytest.approx(0.75)


def test_what_an_earlier_group_left_is_not_read(here: Path) -> None:
    step(ranks(), 7, 7)
    assert ranks()[0].counters() is None
