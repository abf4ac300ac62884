"""What the launcher shows: progress while the fleet loads, then its own log and one line per ended request.

On a terminal progress is a live table; elsewhere every change is a plain line. The whole output of the fleet's
processes goes to a log file; a verbose console shows it too.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import select
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import IO

from rich.console import Console as RichConsole
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from orchestrator.process.files import make_folder, open_own
from orchestrator.process.parent import ALIVE
from orchestrator.process.telemetry.logs import LogFormat, common_log_line, formatter, request_in
from orchestrator.process.telemetry.requests import read_request

_COLOURS = {"worker": 32, "frontend": 35, "launcher": 33}  # ANSI
_REFRESH_PER_S = 8
_MAX_LOG_BYTES = 32 << 20
_MAX_UNREAD_BYTES = 1 << 20
_LAST_WORDS_S = 1.0
_SHOWN_AFTER_FAILURE = 10  # lines
_ERROR = re.compile(r"(^|\s)[\w.]*(Error|Exception): ")  # the last line of a traceback


class LogFile:
    """A log of bounded size; what is older is kept as NAME.1. An earlier launcher's goes on, with why that ended."""

    def __init__(self, path: Path, form: LogFormat = "text", max_bytes: int = _MAX_LOG_BYTES) -> None:
        """Raises OSError."""
        self.path, self.form = path, form
        self._max_bytes = max_bytes
        make_folder(path.parent)
        try:
            self._file = open_own(path, "ab", buffering=0)
        except OSError:  # somebody else's, or no file
            self._file = self._begin()

    def write(self, process: str, line: str) -> None:
        try:
            if self._file.tell() > self._max_bytes or not self.path.exists():
                full, self._file = self._file, self._begin()
                full.close()
            self._file.write(common_log_line(self.form, process, line).encode(errors="replace") + b"\n")
        except (OSError, ValueError):
            return  # a full disk, or closed: the fleet matters more than its log

    def close(self) -> None:
        self._file.close()

    def _begin(self) -> IO[bytes]:
        make_folder(self.path.parent)
        with contextlib.suppress(FileNotFoundError):
            self.path.replace(self.path.with_name(self.path.name + ".1"))
        return open_own(self.path, "xb", buffering=0)


class Outlet:
    """Writes to a stream in a thread, so that the launcher never waits for a stopped terminal, an unread pipe or a full
    disk. Lines that the stream does not take are dropped and counted. Has the methods of a text file that rich needs.
    """

    encoding = "utf-8"

    def __init__(self, stream: IO[str], max_bytes: int = _MAX_UNREAD_BYTES) -> None:
        self.isatty, self.fileno = stream.isatty, stream.fileno
        self._max_bytes = max_bytes
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._dropped_lines = 0
        self._changed = threading.Condition()
        threading.Thread(target=self._drain, name="pd-console", daemon=True).start()

    def write(self, text: str) -> int:
        data = text.encode(errors="replace")
        with self._changed:
            if self._waiting_bytes + len(data) > self._max_bytes:
                self._dropped_lines += data.count(b"\n")
            else:
                self._waiting.append(data)
                self._waiting_bytes += len(data)
                self._changed.notify_all()
        return len(text)

    def flush(self) -> None:
        """Does nothing; `written` waits for the output."""

    def written(self, timeout_s: float) -> bool:
        """Wait until everything is written or dropped. False when something still waits after `timeout_s`."""
        with self._changed:
            deadline = time.monotonic() + timeout_s
            while self._waiting_bytes and (left_s := deadline - time.monotonic()) > 0:
                self._changed.wait(left_s)
            return not self._waiting_bytes

    def _drain(self) -> None:
        while True:
            with self._changed:
                while not self._waiting:
                    self._changed.wait()
                data, dropped = self._waiting.popleft(), self._dropped_lines
            note = f"({dropped} lines were not shown, since nobody took them)\n" if dropped else ""
            try:
                self._write_all(note.encode() + data)
            except (OSError, ValueError):  # ValueError: the stream was closed
                dropped = -data.count(b"\n")
            with self._changed:
                self._dropped_lines -= dropped
                self._waiting_bytes -= len(data)
                self._changed.notify_all()

    def _write_all(self, data: bytes) -> None:
        # Not through the stream: its lock, held by a thread that waits, would hold up the end of the program.
        while data:
            try:
                data = data[os.write(self.fileno(), data) :]
            except BlockingIOError:  # another process that shares the terminal made it non-blocking
                select.select([], [self.fileno()], [])


class Console:
    """Everything goes to one stream that has a file descriptor, line by line."""

    def __init__(self, stream: IO[str] | None = None, verbose: bool = False) -> None:
        self.log_file: LogFile | None = None
        self._verbose = verbose
        self._outlet = Outlet(stream or sys.stdout)
        terminal = self._outlet.isatty()
        self._colour = terminal and not os.environ.get("NO_COLOR")
        # Without markup: a folder's name may have brackets.
        self._rich = RichConsole(file=self._outlet, markup=False, emoji=False) if terminal else None  # type: ignore[arg-type]
        self._live: Live | None = None
        self._rows: dict[str, tuple[str, float, float | None]] = {}  # stage, since, until (monotonic)

    def start_progress(self) -> None:
        if self._rich is not None:
            self._live = Live(console=self._rich, refresh_per_second=_REFRESH_PER_S, get_renderable=self._table)
            self._live.start()

    def stop_progress(self) -> None:
        """The last state stays on the screen; what follows are plain lines."""
        live, self._live = self._live, None
        if live is not None:
            live.stop()

    def flush(self) -> None:
        """What was said gets a moment to be written."""
        self._outlet.written(_LAST_WORDS_S)

    def close(self) -> None:
        self.stop_progress()
        self.flush()
        if self.log_file is not None:
            self.log_file.close()

    def stage(self, name: str, stage: str, done: bool = False) -> None:
        """Show that a part of the fleet has reached this stage; `done` stops its clock."""
        now = time.monotonic()
        _, since, until = self._rows.get(name, ("", now, None))
        if until is not None:
            since = now  # it had ended, and begins again
        self._rows[name] = (stage, since, now if done else None)
        if self._live is None:
            took = f" after {now - since:.1f} s" if done and now - since >= 0.1 else ""
            self.say(f"{name}: {stage}{took}")

    def say(self, line: str, name: str = "") -> None:
        """`name`: of the process whose line it is."""
        if name:
            prefix = f"[{name}]"
            if self._colour:
                prefix = f"\x1b[{_COLOURS.get(name.partition('-')[0], 34)}m{prefix}\x1b[0m"
            line = f"{prefix} {line}"
        if self._live is not None:
            self._live.console.print(Text.from_ansi(line), soft_wrap=True)
        else:
            self._outlet.write(line + "\n")

    def note(self, shown: str, logged: str) -> None:
        """A line of the launcher's own log, as it is shown and as it stands in the log file."""
        self._write_log("launcher", logged)
        self.say(shown, "launcher")

    def log(self, name: str, line: str) -> None:
        if line == ALIVE:
            return
        self._write_log(name, line)
        if self._verbose:
            self.say(line, name)
        elif (encoded := request_in(line)) is not None:
            request = read_request(encoded)
            self.say(line if request is None else request.for_people(), name)

    def show_failure(self, name: str, lines: list[str]) -> None:
        """A failed process's errors, else its last lines. A verbose console has shown them already."""
        errors = [line for line in lines if _ERROR.search(line)]
        for line in [] if self._verbose else (errors or lines)[-_SHOWN_AFTER_FAILURE:]:
            self.say(line, name)

    def _write_log(self, name: str, line: str) -> None:
        if self.log_file is not None:
            self.log_file.write(name, line)

    def _table(self) -> Table:
        table = Table.grid(padding=(0, 2))
        now = time.monotonic()
        for name, (stage, since, until) in self._rows.items():
            mark = Text("✓", style="green") if until is not None else Spinner("dots")
            table.add_row(mark, name, stage, f"{(until or now) - since:.0f} s")
        return table


class ConsoleHandler(logging.Handler):
    def __init__(self, console: Console, form: LogFormat) -> None:
        super().__init__()
        self._console = console
        self._shown = logging.Formatter("%(levelname)s %(name)s: %(message)s")
        self._logged = formatter(form, "launcher")

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._console.note(self._shown.format(record), self._logged.format(record))
        except Exception:  # logging's contract: a line that cannot be formatted must not end the program
            self.handleError(record)
