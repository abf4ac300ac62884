"""What operators are told of a rollout."""

from support_info import worker_info

from orchestrator.store.configuration import Phase, Rollout, Version
from orchestrator.store.planned import Reading, rollout_status
from orchestrator.store.registry import Frontend


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
