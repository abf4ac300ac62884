"""One ended request as a waterfall: from the log, else from what frontends remember."""

from pathlib import Path
from unittest.mock import AsyncMock

import msgspec
import pytest
from rich.console import Console
from support_info import request_line

from orchestrator.cli.handle import FleetHandle
from orchestrator.cli.look import trace
from orchestrator.cli.look.trace import _chosen, _recorded_requests, request_lines, waterfall
from orchestrator.process.telemetry.requests import RequestLine

LINE = request_line("abc-1")


def shown(request: RequestLine, width: int = 100) -> list[str]:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))
    console.print(waterfall(request, width))
    return [row.rstrip() for row in console.export_text().splitlines()]


def test_waterfall_shows_stages_in_place():
    head, *rows = shown(LINE)[:8]
    assert "abc-1  finished, remote (cost), 400 + 8 tokens, 805.0 ms, first token after 565.0 ms" in " ".join(
        [head, *rows]
    )
    rows = [row for row in shown(LINE) if row.startswith("  ")]
    assert [row.split()[0] for row in rows] == ["frontend", "place", "queue", "claim", "prefill", "transfer", "decode"]
    begins = [min(row.find(mark) for mark in "━╸" if mark in row) for row in rows]
    assert begins == sorted(begins)
    prefill, decode = rows[4], rows[6]
    assert prefill.count("━") == pytest.approx(2 * decode.count("━"), abs=8), "500 ms and 200 ms"
    assert prefill.endswith("500.0 ms  prefill-0") and decode.endswith("200.0 ms  decode-0")


def test_it_fits_80_columns():
    assert max(map(len, shown(LINE, 80))) <= 80


def test_lines_are_read_from_a_log_that_others_write_to(tmp_path: Path):
    log = tmp_path / "x.log"
    encoded = msgspec.json.encode(LINE).decode()
    log.write_text(
        "[frontend-0] 2026-01-31 12:00:00.123 INFO frontend-0 pd.router: hello\n"
        f"[frontend-0] 2026-01-31 12:00:00.123 INFO frontend-0 pd.request: {encoded}\n"
        "[frontend-0] 2026-01-31 12:00:00.123 INFO frontend-0 pd.request: {\n"
        '[frontend-0] 2026-01-31 12:00:00.123 INFO frontend-0 pd.request: {"new":' + "[" * 2000 + "\n"
    )
    assert list(request_lines(log)) == [LINE]
    assert list(request_lines(tmp_path / "gone.log")) == []


def test_requested_trace_is_chosen():
    lines = [request_line("abc-1", 5), request_line("abc", 9), request_line("xyz", 7)]
    assert [found.id for found in _chosen(lines, "abc", 0)] == ["abc"]
    assert [found.id for found in _chosen(lines, "xy", 0)] == ["xyz"]
    assert [found.id for found in _chosen(lines, None, 0)] == ["xyz"], "the last"
    assert [found.id for found in _chosen(lines, None, 2)] == ["abc", "xyz"], "the slowest"
    assert _chosen(lines, "q", 0) == []


async def test_a_frontend_that_did_not_answer_is_named(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    said = {"requests": [msgspec.to_builtins(LINE)], "silent_frontends": ["frontend-1-abc"]}
    monkeypatch.setattr(trace, "get", AsyncMock(return_value=said))
    assert await _recorded_requests(FleetHandle("default", None, "http://f", None), None, 5) == [LINE]
    assert "frontend-1-abc" in capsys.readouterr().err
