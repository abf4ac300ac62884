"""What is waited for is given up by the time in which it could have happened."""

from orchestrator.launch.decisions.replacement import Unchanged


def test_the_time_begins_anew_with_each_change():
    unchanged = Unchanged()
    assert unchanged.look("a", 100.0) == 0.0
    assert unchanged.look("a", 130.0) == 30.0
    assert unchanged.look("b", 140.0) == 0.0
    assert unchanged.look("b", 141.0) == 1.0


def test_the_time_away_alone_is_left_out():
    unchanged = Unchanged()
    unchanged.look("a", 100.0)
    for away_s, counted_s in ((500.0, 10.0), (1.0, 20.0)):
        now = unchanged._looked_at + 10.0
        assert unchanged.look("a", now) == counted_s
        unchanged.was_away()
        assert unchanged.look("a", now + away_s) == counted_s
    unchanged.was_away()
    assert unchanged.look("b", 1000.0) == 0.0, "it has changed meanwhile"
