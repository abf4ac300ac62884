"""The tables of `bench_kv.py`: turns of several calls joined, and ours beside the other modes and vLLM's."""

from dataclasses import asdict

from benchmarks.kv_tables import REFERENCE, Row, RunTimes, joined, markdown


def row(variant: str, turn: str, *exposed_ms: float) -> Row:
    runs = [RunTimes(0.1, exposed / 1e3, 0.01) for exposed in exposed_ms]
    return Row.of("kv-heavy", variant, 512, 1 << 26, 0.03, {turn: runs})


def test_turns_of_later_calls_are_added():
    (found,) = joined([row("auto", "first", 1.0, 3.0), row("auto", "second", 5.0)])
    assert (found.runs, found.rounds, found.exposed_s, found.exposed_best_s) == (3, 2, 0.003, 0.001)
    assert list(found.turns) == ["first", "second"]
    assert joined([found]) == [found]


def test_where_exposed_time_goes_is_of_the_runs_that_know_it():
    runs = [RunTimes(0.1, 0.003, 0.01), RunTimes(0.1, 0.003, 0.01, begun_s=0.001, waited_s=0.002)]
    (found,) = joined([Row.of("kv-heavy", "auto", 512, 1 << 26, 0.03, {"first": runs})])
    assert (found.begun_s, found.waited_s) == (0.001, 0.002)
    assert "| 3.0 (3.0) | 1.0 | 2.0 |" in markdown({"device": "here", "rows": [asdict(found)]})
    assert row("auto", "first", 1.0).begun_s is None


def test_ours_is_beside_the_other_modes_and_vllms_connectors():
    exposed = {"auto": 3.0, "chunk": 24.0, "layer": 2.0, REFERENCE: 60.0}
    rows = [asdict(row(variant, "first", ms)) for variant, ms in exposed.items()]
    text = markdown({"device": "here", "rows": rows})
    assert "| 512 | 3.0 | 24.0 | 2.0 | 0.12 | +1.0 | 1.000 |" in text
    assert "| 512 | 3.0 | 0.05 | 0.10 | -35.6% |  |" in text
