"""The size that the launcher gives a fleet: by what was late, with no going up and down."""

from itertools import pairwise

import msgspec
import pytest
from support_redis import worker

from orchestrator.config.settings import ScaleConfig
from orchestrator.launch.decisions.fleet_size import FleetSize, Sample, resized
from orchestrator.launch.registry_watch import Snapshot
from orchestrator.store.registry import Frontend
from orchestrator.types import DesiredRatio, Offered, Role

SCALE = ScaleConfig(min_workers=2, max_workers=6, attainment=0.9, grow_after_s=10)
NOW = 1000.0


def samples(seconds: int, ended: int, late_first: int = 0, late_tokens: int = 0, both: int = 0) -> list[Sample]:
    """One a second until now. `both`: of those that were late, by how many each objective was missed."""
    late = late_first + late_tokens - both
    counted = Offered(ended=ended, late_first=late_first, late_tokens=late_tokens, late=late)
    return [(NOW - n, counted) for n in range(seconds, -1, -1)]


def size(prefill: int, decode: int, seen: list[Sample], scale: ScaleConfig = SCALE, late_at=None):
    resize = resized(seen, DesiredRatio(prefill, decode), scale, late_at or {}, NOW)
    return resize and (resize.prefill, resize.decode)


def test_it_grows_on_the_side_whose_objective_is_missed():
    assert size(2, 2, samples(20, 10, late_first=3, late_tokens=1)) == (3, 2)
    assert size(2, 2, samples(20, 10, late_first=1, late_tokens=3)) == (2, 3)
    assert size(0, 4, samples(20, 10, late_first=3)) == (0, 5), "without prefill workers decode workers prefill"


def test_it_keeps_its_limits_and_is_off_without_them():
    late, idle = samples(200, 10, late_first=9), samples(200, 0)
    assert size(3, 3, late) is None and size(1, 1, idle) is None
    assert size(3, 2, late) == (4, 2)
    off = ScaleConfig(attainment=0.9, grow_after_s=10)
    assert size(2, 2, late, off) is None and size(2, 2, idle, off) is None


def test_a_request_that_misses_both_objectives_is_late_once():
    assert size(2, 2, samples(20, 100, late_first=8, late_tokens=8)) == (3, 2), "84% on time"
    assert size(2, 2, samples(20, 100, late_first=8, late_tokens=8, both=8)) is None, "92% on time"


def test_few_requests_or_short_time_change_nothing():
    assert size(2, 2, samples(20, 1, late_first=1)) is None
    assert size(2, 2, samples(5, 10, late_first=9)) is None, "since it has this size"


def test_it_shrinks_by_one_after_a_long_time_far_above_the_objective():
    assert size(2, 2, samples(99, 10)) is None
    assert size(2, 2, samples(100, 10)) == (1, 2)
    assert size(1, 3, samples(100, 0)) == (1, 2), "idle"
    assert size(3, 1, samples(100, 0)) == (2, 1), "the last decode worker stays"
    assert size(1, 2, samples(100, 10, late_first=1)) is None, "at the objective, not far above it"
    lately = [*samples(100, 10)[:97], *samples(3, 10, late_first=2)]
    assert size(2, 2, lately) is None
    assert size(1, 1, samples(100, 10), ScaleConfig(min_workers=1, grow_after_s=10)) is None


def test_size_that_was_too_small_is_avoided():
    assert size(2, 2, samples(100, 10), late_at={3: NOW - 500}) is None
    assert size(2, 2, samples(100, 10), late_at={3: NOW - 601}) == (1, 2)


def snapshot(at: float, desired: DesiredRatio, ended: int, late: int, ready: int = 4) -> Snapshot:
    return Snapshot(
        workers={f"w{n}": worker(f"w{n}", Role.DECODE) for n in range(ready)},
        frontends={"f": Frontend("f", "", "", 0.0, Offered(ended=ended, late_first=late, late=late))},
        desired=desired,
        read_at=at,
    )


@pytest.fixture
def fleet_size() -> FleetSize:
    return FleetSize(SCALE)


def test_samples_of_incomplete_fleet_do_not_count(fleet_size):
    two, three = DesiredRatio(2, 2, set_at=1.0), DesiredRatio(3, 2, set_at=2.0)
    resizes = [fleet_size.observe(snapshot(float(n), two, 1000 + 10 * n, 500 + 5 * n)) for n in range(12)]
    assert [n for n, resize in enumerate(resizes) if resize] == [10, 11], "what came before it looked is not counted"
    assert fleet_size.observe(snapshot(12.0, three, 1120, 560, ready=4)) is None, "one loads"
    later = [fleet_size.observe(snapshot(float(n), three, 1000 + 10 * n, 565, ready=5)) for n in range(13, 60)]
    assert not any(later)


def test_what_was_late_without_redis_is_no_reason_to_grow(fleet_size):
    desired = DesiredRatio(2, 2, set_at=1.0)
    for now in range(20):
        assert fleet_size.observe(snapshot(float(now), desired, 10 * now, 0)) is None
    back = msgspec.structs.replace(snapshot(50.0, desired, 1000, 500), was_away=True)
    assert fleet_size.observe(back) is None
    assert fleet_size.observe(snapshot(51.0, desired, 1100, 550)) is None, "a frontend tells it with its next heartbeat"
    assert fleet_size.observe(snapshot(52.0, desired, 1200, 600)) is None, "or with the one after that"
    assert fleet_size.observe(snapshot(53.0, desired, 1300, 650)) is not None


def test_fleet_waiting_for_room_can_only_shrink(fleet_size):
    """The last one that was asked for has no room anywhere."""
    desired, sizes, ended = DesiredRatio(2, 3, set_at=1.0), [], 0
    for now in range(450):
        ended += 10 if now < 100 else 0
        resize = fleet_size.observe(snapshot(float(now), desired, ended, ended, ready=min(4, sum(size_of(desired)))))
        if resize is not None:
            desired = DesiredRatio(resize.prefill, resize.decode, set_at=float(now))
            sizes.append((now, sum(size_of(desired))))
    assert [total for _, total in sizes] == [4, 3, 2], sizes
    assert sizes[0][0] >= 199, "while all were late it was right to wait"


def size_of(desired: DesiredRatio) -> tuple[int, int]:
    return desired.prefill, desired.decode


def test_a_fleet_at_its_limit_does_not_go_up_and_down(fleet_size):
    """Three workers are too few, four are enough."""
    desired, ended, late, moves = DesiredRatio(1, 2, set_at=0.0), 0, 0, []
    for now in range(2000):
        ended += 10
        late += 5 if desired.prefill + desired.decode < 4 else 0
        resize = fleet_size.observe(snapshot(float(now), desired, ended, late, ready=9))
        if resize is not None:
            desired = DesiredRatio(resize.prefill, resize.decode, set_at=float(now))
            moves.append((now, desired.prefill + desired.decode))
    assert [total for _, total in moves] == [4, 3, 4, 3, 4, 3, 4], moves
    shrunk = [at for at, total in moves if total == 3]
    assert all(later - earlier >= 600 for earlier, later in pairwise(shrunk)), "not after every 100 seconds"
