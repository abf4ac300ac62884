"""A short mix of what `make chaos` does at length: faults under streaming load that no client may notice."""

import asyncio
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from chaos import chaos, table

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(300)]


def test_no_client_notices_a_fault():
    found = asyncio.run(chaos(["prefill_stopped", "decode_killed", "redis_killed", "poison"], runs=1, seed=7))
    print(table(found))
    for seen in found:
        assert (seen.errors, seen.wrong, seen.leaks) == ([], 0, 0), seen.fault
        assert seen.answers > 8 and seen.gaps_s
