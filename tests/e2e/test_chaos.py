"""A short mix of what `make chaos` does at length: faults under streaming load that no client may notice."""

import pytest

from benchmarks.chaos.__main__ import measure
from benchmarks.chaos.report import table
from benchmarks.chaos.table import FAULTS

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(300)]

MIX = ["prefill_stopped_prefilling", "decode_killed_decoding", "decode_stopped_awaiting_kv", "queue_lost"]
MIX += ["redis_killed", "log_pipe_unread", "poison"]


def test_no_client_notices_a_fault():
    """How long gaps may be is not asked here: that depends on what else the machine does."""
    rows = measure([FAULTS[name] for name in MIX], runs=1, real=False, seed=7)
    print(table(rows))
    for row in rows:
        seen = row.seen
        assert (dict(seen.errors), seen.wrong, seen.leaks, row.failures) == ({}, 0, 0, []), seen.fault
        assert seen.runs == 1 and seen.answers > 8 and seen.gaps_s
