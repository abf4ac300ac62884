"""For how long something has waited, of a process that stood still meanwhile."""

import pytest

from orchestrator.fleet.pause import Pause


@pytest.mark.parametrize(("since", "waited_s"), [(80.0, 20.0), (95.0, 10.0), (99.5, 10.0), (101.0, 9.0)])
def test_a_stall_counts_only_for_what_came_before_it(since: float, waited_s: float):
    """On waking, sockets are handled before the timer that notes it."""
    pause = Pause()
    pause.stood_still(100.0, 10.0)
    assert pause.waited_s(since, 110.0) == waited_s
