"""What the launcher shows of its processes' output, and the log that has all of it."""

from __future__ import annotations

import io
from pathlib import Path

import msgspec

from orchestrator.launch.console import Console, LogFile, shown_request
from orchestrator.router.request_log import RequestLine

LINE = RequestLine(
    id="abc", outcome="finished", decision="remote", reason="long_prompt", prompt_tokens=400, output_tokens=8,
    attempts=1, decode_worker="decode-0", prefill_worker="prefill-0", total_ms=800.0, ttft_ms=600.0, queued_ms=1.2,
    prefill_ms=500.0, exposed_ms=40.0, decode_ms=200.0, cached_tokens=16,
)  # fmt: skip


def logged(line: RequestLine) -> str:
    """As a frontend writes it."""
    return f"12:00:00.123 INFO pd.request: {msgspec.json.encode(line).decode()}"


def test_a_quiet_console_shows_requests_and_the_launchers_own_lines_only(tmp_path):
    stream = io.StringIO()
    console = Console(stream)
    console.log_file = LogFile(tmp_path / "log")
    console.log("decode-0", "WARNING of an engine")
    console.log("frontend-0", logged(LINE))
    console.note("WARNING pd.launcher: decode-0 died")
    shown = stream.getvalue().splitlines()
    assert [line.partition(" ")[0] for line in shown] == ["[frontend-0]", "[launcher]"]
    assert (tmp_path / "log").read_text().splitlines() == [
        "[decode-0] WARNING of an engine",
        f"[frontend-0] {logged(LINE)}",
        "[launcher] WARNING pd.launcher: decode-0 died",
    ]
    console.show_failure("decode-0", [str(number) for number in range(100)])
    assert stream.getvalue().splitlines()[-1] == "[decode-0] 99"
    console.show_failure("decode-0", ["Traceback", "  File x", "ValueError: no memory", *map(str, range(50))])
    assert stream.getvalue().splitlines()[-2:] == ["[decode-0] 99", "[decode-0] ValueError: no memory"]


def test_a_verbose_console_shows_everything_as_it_is_and_nothing_twice():
    stream = io.StringIO()
    console = Console(stream, verbose=True)
    console.log("decode-0", "WARNING of an engine")
    console.log("frontend-0", logged(LINE))
    console.show_failure("decode-0", ["WARNING of an engine"])
    assert stream.getvalue().splitlines() == ["[decode-0] WARNING of an engine", f"[frontend-0] {logged(LINE)}"]


def test_a_request_is_told_by_its_stages():
    assert shown_request(logged(LINE)) == (
        "pd.request abc: finished, 400 (16 cached) prompt and 8 output tokens, prefilled by prefill-0, decoded by "
        "decode-0 (long_prompt); queued 1 ms, prefill 500 ms, exposed transfer 40 ms, decode 200 ms"
    )
    local = msgspec.structs.replace(
        LINE, prefill_worker=None, reason="short_prompt", queued_ms=None, exposed_ms=None, cached_tokens=0
    )
    assert shown_request(logged(local)) == (
        "pd.request abc: finished, 400 prompt and 8 output tokens, prefilled and decoded by decode-0 (short_prompt); "
        "prefill 500 ms, decode 200 ms"
    )
    refused = RequestLine("abc", "rejected", "reject", "full", 9, 0, 1, None, None, 0.1)
    assert shown_request(logged(refused)) == "pd.request abc: rejected, 9 prompt and 0 output tokens (full)"


def test_other_lines_are_no_requests_and_one_that_is_cut_short_is_shown_as_it_is():
    assert shown_request("INFO pd.frontend: listening") is None
    cut = logged(LINE)[:60]
    assert shown_request(cut) == cut


def test_the_log_is_bounded_and_the_one_before_is_kept(tmp_path: Path):
    for start in ("first", "second"):
        log = LogFile(tmp_path / "log", max_bytes=1000)
        log.write(start)
        log.close()
    assert (tmp_path / "log.1").read_text() == "first\n"
    log = LogFile(tmp_path / "log", max_bytes=1000)
    for number in range(1000):
        log.write(f"line {number}")
    sizes = [path.stat().st_size for path in tmp_path.iterdir()]
    assert len(sizes) == 2 and max(sizes) < 1100
    assert (tmp_path / "log").read_text().endswith("line 999\n")
    log.close()
    log.write("after its end")
