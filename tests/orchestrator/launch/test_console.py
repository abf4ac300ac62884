"""What the launcher shows of its processes' output, and the log that has all of it."""

import asyncio
import os
import select
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import IO

import msgspec
import pytest

from orchestrator.config.settings import parse_config
from orchestrator.launch.announcement import announce
from orchestrator.launch.console import Console, LogFile, Outlet
from orchestrator.launch.host.process import LocalProcess, ProcessSpec
from orchestrator.process.telemetry.requests import RequestLine
from orchestrator.types import DesiredRatio

LINE = RequestLine(
    id="abc", outcome="finished", decision="remote", reason="long_prompt", prompt_tokens=400, output_tokens=8,
    attempts=1, decode_worker="decode-0", prefill_worker="prefill-0", total_ms=800.0, ttft_ms=600.0, queued_ms=1.2,
    prefill_ms=500.0, exposed_ms=40.0, decode_ms=200.0, cached_tokens=16,
)  # fmt: skip


WRITTEN_S = 60.0


@pytest.fixture
def stream(tmp_path: Path) -> Iterator[IO[str]]:
    with (tmp_path / "shown").open("w+") as stream:
        yield stream


def shown(console: Console, stream: IO[str]) -> list[str]:
    console.close()
    return Path(stream.name).read_text().splitlines()


def test_a_fleet_is_noted_as_ready_once_that_was_shown(stream: IO[str], monkeypatch: pytest.MonkeyPatch):
    """Then `up --detach` reads no more, and the thread that writes may be late on a busy machine."""
    console, at_ready = Console(stream), list[str]()
    write = console._outlet._write_all
    monkeypatch.setattr(console._outlet, "_write_all", lambda data: (time.sleep(0.01), write(data)))
    config = parse_config({"model": "demo"})
    fleet = SimpleNamespace(config=config, desired=DesiredRatio(1, 1), url="http://127.0.0.1:1")
    folder = SimpleNamespace(note_ready=lambda ready: at_ready.append(Path(stream.name).read_text()))
    announce({"": fleet}, "CPU", folder, console)  # type: ignore[dict-item, arg-type]
    assert at_ready[0].startswith("Ready  http://127.0.0.1:1") and at_ready[0].count("curl") == 2
    console.close()


def logged(line: RequestLine) -> str:
    """As a frontend writes it."""
    return f"2026-01-31 12:00:00.123 INFO frontend-0 pd.request: {msgspec.json.encode(line).decode()}"


def test_a_quiet_console_shows_requests_and_the_launchers_own_lines_only(tmp_path, stream):
    console = Console(stream)
    console.log_file = LogFile(tmp_path / "log")
    console.log("decode-0", "WARNING of an engine")
    console.log("frontend-0", logged(LINE))
    console.note("WARNING pd.launcher: decode-0 died", "12:00 WARNING launcher pd.launcher: decode-0 died")
    assert [line.partition(" ")[0] for line in shown(console, stream)] == ["[frontend-0]", "[launcher]"]
    assert (tmp_path / "log").read_text().splitlines() == [
        "[decode-0] WARNING of an engine",
        f"[frontend-0] {logged(LINE)}",
        "[launcher] 12:00 WARNING launcher pd.launcher: decode-0 died",
    ]
    console.show_failure("decode-0", [str(number) for number in range(100)])
    assert shown(console, stream)[-1] == "[decode-0] 99"
    console.show_failure("decode-0", ["Traceback", "  File x", "ValueError: no memory", *map(str, range(50))])
    assert shown(console, stream)[-2:] == ["[decode-0] 99", "[decode-0] ValueError: no memory"]


def test_a_verbose_console_shows_everything_as_it_is_and_nothing_twice(stream):
    console = Console(stream, verbose=True)
    console.log("decode-0", "WARNING of an engine")
    console.log("frontend-0", logged(LINE))
    console.show_failure("decode-0", ["WARNING of an engine"])
    assert shown(console, stream) == ["[decode-0] WARNING of an engine", f"[frontend-0] {logged(LINE)}"]


def test_request_is_shown_with_its_stages():
    assert LINE.for_people() == (
        "pd.request abc: finished, 400 (16 cached) prompt and 8 output tokens, prefilled by prefill-0, decoded by "
        "decode-0 (long_prompt); queued 1 ms, prefill 500 ms, exposed transfer 40 ms, decode 200 ms"
    )
    local = msgspec.structs.replace(
        LINE, prefill_worker=None, reason="short_prompt", queued_ms=None, exposed_ms=None, cached_tokens=0
    )
    assert local.for_people() == (
        "pd.request abc: finished, 400 prompt and 8 output tokens, prefilled and decoded by decode-0 (short_prompt); "
        "prefill 500 ms, decode 200 ms"
    )
    refused = RequestLine("abc", "rejected", "reject", "full", 9, 0, 1, None, None, 0.1)
    assert refused.for_people() == "pd.request abc: rejected, 9 prompt and 0 output tokens (full)"


def test_truncated_lines_are_shown_unchanged_and_others_are_not(stream):
    deep, cut = logged(LINE).partition("{")[0] + '{"new":' + "[" * 2000, logged(LINE)[:60]
    console = Console(stream)
    for line in ("INFO pd.frontend: listening", deep, cut):
        console.log("frontend-0", line)
    assert shown(console, stream) == [f"[frontend-0] {deep}", f"[frontend-0] {cut}"]


def test_a_launcher_that_fails_again_and_again_keeps_why_it_did_so_first(tmp_path: Path):
    for start in range(5):
        log = LogFile(tmp_path / "log")
        log.write("p", f"cause {start}")
        log.close()
    assert (tmp_path / "log").read_text() == "".join(f"[p] cause {start}\n" for start in range(5))


def test_a_log_that_is_not_ours_is_set_aside(tmp_path: Path):
    (tmp_path / "log").symlink_to(tmp_path / "other")
    log = LogFile(tmp_path / "log")
    log.write("p", "line")
    log.close()
    assert (tmp_path / "log").read_text() == "[p] line\n" and not (tmp_path / "other").exists()


@pytest.mark.parametrize("before", [0, 990], ids=["new", "continued"])
def test_log_is_rotated_once(tmp_path: Path, before: int):
    (tmp_path / "log").write_text("x" * before)
    log = LogFile(tmp_path / "log", max_bytes=1000)
    for number in range(1000):
        log.write("p", f"line {number}")
    sizes = [path.stat().st_size for path in tmp_path.iterdir()]
    assert len(sizes) == 2 and max(sizes) < 1100
    assert (tmp_path / "log").read_text().endswith("line 999\n")
    log.close()
    log.write("p", "after its end")


def test_the_log_comes_back_after_its_folder_was_removed(tmp_path: Path):
    log = LogFile(tmp_path / "run" / "log")
    log.write("p", "before")
    shutil.rmtree(tmp_path / "run")
    log.write("p", "after")
    assert (tmp_path / "run" / "log").read_text() == "[p] after\n"
    log.close()


# More than the pipe from the child and the console's own buffer take together.
TALKATIVE = "import sys\nfor _ in range(8000): sys.stderr.write('x' * 400 + chr(10))"


@pytest.mark.parametrize("what", ["an unread pipe", "a full disk", "a closed pipe"])
async def test_child_does_not_wait_for_launcher_reader(what):
    if what == "a full disk":
        reader, writer = -1, os.open("/dev/full", os.O_WRONLY)
    else:
        reader, writer = os.pipe()
    if what == "a closed pipe":
        os.close(reader)
    with os.fdopen(writer, "w") as stream:
        console = Console(stream, verbose=True)
        child = LocalProcess(ProcessSpec("decode-0", [sys.executable, "-c", TALKATIVE]), console.log)
        await child.start()
        try:
            async with asyncio.timeout(WRITTEN_S):
                assert await child.wait() == 0
        finally:
            child.kill()
            if what == "an unread pipe":
                os.close(reader)
            console.close()  # its thread must not write to whatever has this descriptor next


def test_dropped_lines_are_counted():
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as stream:
        outlet = Outlet(stream, max_bytes=100_000)
        for number in range(10_000):
            outlet.write(f"line {number} {'x' * 90}\n")
        assert not outlet.written(0.05)
        read = bytearray()
        while not outlet.written(0):
            if select.select([reader], [], [], 0.01)[0]:  # all may have been read, but not yet counted as written
                read += os.read(reader, 65536)
        outlet.write("the last line\n")
        assert outlet.written(WRITTEN_S)
    while data := os.read(reader, 65536):
        read += data
    os.close(reader)
    *lines, last = read.decode().splitlines()
    dropped = sum(int(line[1:].split()[0]) for line in lines if line.startswith("("))
    assert last == "the last line"
    assert dropped > 5_000 and dropped + sum(line.startswith("line ") for line in lines) == 10_000
