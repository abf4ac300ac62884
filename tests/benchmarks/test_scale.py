"""The scale benchmark: every worker is in one process, and a table is shown of what was measured."""

from benchmarks.scale import table
from benchmarks.scale.__main__ import shares


def test_every_worker_is_in_one_process() -> None:
    for count in (1, 4, 10, 250, 333, 1000):
        assert [number for ids in shares(count) for number in ids] == list(range(count))
        assert all(shares(count))
    assert len(shares(1000)[-1]) == 100


def test_unmeasured_values_are_marked() -> None:
    ended = {"workers": 1000, "frontends": 4, "join_s": 12.5, "ended": "not within 120 s: all have joined"}
    shown = table.table([ended])
    assert "| all have joined, s | 30 | 12.5 |" in shown
    assert "| a new frontend sees all, s | 5 | not measured |" in shown
