"""What operators are told of a rollout."""

from orchestrator.store.configuration import Phase, Rollout, Version
from orchestrator.store.planned import rollout_status
from orchestrator.store.registry import Frontend


def test_rollout_status_names_frontends_left_behind():
    frontends = {
        "a": Frontend("a", "http://launchers-own", "1", generation=0),
        "b": Frontend("b", "http://behind", "2", generation=0, by_hand=True),
        "c": Frontend("c", "http://restarted", "3", generation=1, by_hand=True),
        "d": Frontend("d", "", "4", generation=0, by_hand=True),  # it leaves
    }

    def named(phase: Phase) -> list[str]:
        return rollout_status(Rollout(Version(0, {}), Version(1, {}), 1, phase), frontends).to_restart

    assert named(Phase.DONE) == ["http://behind"]
    assert named(Phase.UNDONE) == ["http://restarted"]
    assert named(Phase.FORWARD) == named(Phase.BACK) == [], "until then it would come back as it was"
