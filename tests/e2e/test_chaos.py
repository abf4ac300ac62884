"""A short mix of what `make chaos` does at length: faults under streaming load that no client may notice."""

from collections import Counter

import pytest

from benchmarks.chaos.__main__ import Budget, measure
from benchmarks.chaos.load import Seen
from benchmarks.chaos.report import Row, save, saved, table
from benchmarks.chaos.table import FAULTS

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(300)]

MIX = ["prefill_stopped_prefilling", "decode_killed_decoding", "decode_stopped_awaiting_kv", "queue_lost"]
MIX += ["redis_killed", "log_pipe_unread", "poison", "operator_restarts_one_killed"]
MIX += ["pair_prefill_decode_killed", "pair_decode_redis_killed"]


def test_no_client_notices_a_fault():
    """How long gaps may be is not asked here: that depends on what else the machine does."""
    rows = measure([FAULTS[name] for name in MIX], real=False, seed=7, budget=Budget(runs=1))
    print(table(rows))
    assert {row.seen.fault for row in rows} == set(MIX), "a fleet that did not start is left out"
    for row in rows:
        seen = row.seen
        assert (dict(seen.errors), seen.wrong, seen.leaks, row.failures) == ({}, 0, 0, []), seen.fault
        assert seen.runs == 1 and seen.answers >= 8 and seen.gaps_s  # one of each client at least


def row(**seen):
    return Row(
        Seen("frontend_killed", **{"runs": 2, "answers": 9, "gaps_s": [0.1, 0.4], "gone_s": [0.3], **seen}), "real", []
    )


@pytest.mark.parametrize(
    ("seen", "missed"),
    [
        ({}, []),
        ({"own_errors": 5}, []),
        ({"errors": Counter({"500: no": 2})}, ["2 times 500: no"]),
        ({"wrong": 1}, ["1 wrong answers"]),
        ({"leaks": 1}, ["1 leaks"]),
        (
            {"gaps_s": [0.1, 3.2], "queued_s": [0.2, 2.9]},
            ["a gap of 3.20 s, at most 3 s; the longest wait in the prefill queue was 2.90 s"],
        ),
        ({"gone_s": [0.1, 2.5]}, ["work gone after 2.50 s, at most 2 s"]),
        ({"false_losses": 1}, ["1 workers were taken for dead"]),
    ],
)
def test_failed_row_names_reason(seen, missed, tmp_path):
    assert row(**seen).missed() == missed
    save([row(**seen)], tmp_path)
    assert [again.missed() for again in saved(tmp_path)] == [missed]  # also when it is added to later
    assert row(**seen).cells()[-1] == ("no" if missed else "yes")
