"""What operators are told of a rollout, the units of a reading, and who of those that hold ids is a launcher."""

from support_info import worker_info

from orchestrator.store.configuration import Phase, Rollout, Version
from orchestrator.store.fields import Frontend, Launcher
from orchestrator.store.planned import BY_HAND, Reading, launched, loading_by_hand, of_launchers, rollout_status
from orchestrator.types import Role


def test_rollout_status_names_frontends_left_behind():
    frontends = {
        "a": Frontend("a", "http://launchers-own", "1", generation=0),
        "b": Frontend("b", "http://behind", "2", generation=0, by_hand=True),
        "c": Frontend("c", "http://restarted", "3", generation=1, by_hand=True),
        "d": Frontend("d", "", "4", generation=0, by_hand=True),  # it leaves
    }

    def named(phase: Phase) -> list[str]:
        return rollout_status(Rollout(Version(0, {}), Version(1, {}), 1, phase), frontends)["to_restart"]

    assert named(Phase.DONE) == ["http://behind"]
    assert named(Phase.UNDONE) == ["http://restarted"]
    assert named(Phase.FORWARD) == named(Phase.BACK) == [], "until then it would come back as it was"


def test_units_of_a_reading_are_gathered_once():
    """A launcher looks each of its workers up in them: of two thousand, that would be two thousand times as much."""
    reading = Reading({"a": worker_info("a"), "b": worker_info("b", ranks=("b", "b.1"))})
    assert [*reading.units] == ["a"], "a rank is missing"
    assert reading.units is reading.units


def test_a_worker_that_is_started_by_hand_is_no_launcher():
    holders = {
        "here/1/1": Launcher({"worker-0": Role.DECODE}),
        f"{BY_HAND}here/2/1": Launcher({"mine": Role.PREFILL}),
    }
    assert of_launchers(holders).keys() == {"here/1/1"}
    assert launched(holders) == {"worker-0"}, "nobody drains it, or starts it again"
    assert loading_by_hand(holders) == {"mine": Role.PREFILL}
