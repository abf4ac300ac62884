"""How many frontends by what they do: more at once where they are busy, one fewer after a quiet minute."""

import pytest

from orchestrator.launch.decisions.fleet_size import FrontendSample, frontends_wanted


def run(
    count: int, cpu: float, in_flight: int = 0, for_s: float = 100.0, least: int = 1, most: int = 8
) -> tuple[int, float]:
    """A sample a second of a steady load: another number and after how many seconds, or the same number."""
    samples: list[FrontendSample] = []
    for at in range(int(for_s) + 1):
        samples.append(FrontendSample(float(at), count, cpu, in_flight))
        wanted = frontends_wanted(samples, least, most, float(at))
        if wanted is not None:
            return wanted, float(at)
    return count, for_s


def test_busy_frontends_get_help_within_seconds():
    assert run(1, cpu=0.9) == (2, 5.0)
    assert run(2, cpu=3.9) == (8, 5.0), "as many as it takes"
    assert run(1, cpu=0.1, in_flight=2000) == (4, 5.0)
    assert run(8, cpu=8.0) == (8, 100.0), "no more than allowed"


def test_short_load_peak_adds_no_frontend():
    busy = [FrontendSample(float(at), 1, 0.9 if at % 3 else 0.2, 0) for at in range(30)]
    assert all(frontends_wanted(busy[: n + 1], 1, 8, float(n)) is None for n in range(30))


def test_one_goes_after_a_quiet_minute():
    assert run(3, cpu=0.1) == (2, 60.0)
    assert run(1, cpu=0.0) == (1, 100.0), "one stays"
    assert run(2, cpu=0.0, least=2) == (2, 100.0)
    assert run(2, cpu=0.3, in_flight=500) == (2, 100.0), "as many requests keep it"


def test_limits_that_changed_hold_at_once():
    assert run(1, cpu=0.0, least=3) == (3, 0.0) and run(9, cpu=9.0, most=4) == (4, 0.0)


@pytest.mark.parametrize("cpu", [n / 20 for n in range(100)])
def test_a_steady_load_settles_and_does_not_go_up_and_down(cpu: float):
    """What the load is does not depend on how many share it; the number that is found stays."""
    count, changes = 1, 0
    while (wanted := run(count, cpu)[0]) != count:
        count, changes = wanted, changes + 1
        assert changes < 10, f"{cpu} cores"
    assert count == 8 or cpu <= 0.75 * count
