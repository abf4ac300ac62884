"""When loops look that look every so often."""

import os
import time

import pytest

from orchestrator.process import tasks


def test_ticks_of_a_multiple_are_ticks_and_other_processes_have_others(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)

    def of_process(pid: int, interval_s: float) -> float:
        monkeypatch.setattr(os, "getpid", lambda: pid)
        return now + tasks.left_s(interval_s)

    second = of_process(77, 1.0)
    tenths = [of_process(77, 0.1)]
    while tenths[-1] < second - 0.05:
        now = tenths[-1] + 0.02
        tenths.append(of_process(77, 0.1))
    assert tenths[-1] == pytest.approx(second)
    now = second
    assert of_process(77, 1.0) == pytest.approx(second + 1.0), "the tick that it is, is not waited for"
    apart = {round(of_process(pid, 1.0) % 1.0, 1) for pid in range(5000, 5200)}
    assert len(apart) >= 10
