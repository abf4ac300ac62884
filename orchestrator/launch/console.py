"""What the launcher shows: progress while the fleet loads, then the log lines of its processes by name.

On a terminal progress is a live table; elsewhere every change is a plain line.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from typing import IO

from rich.console import Console as RichConsole
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

_COLOURS = {"prefill": 36, "decode": 32, "frontend": 35, "launcher": 33}  # ANSI
_REFRESH_PER_S = 8


class Console:
    """Everything goes to one stream, line by line. A stream whose reader is gone is written to no more."""

    def __init__(self, stream: IO[str] | None = None) -> None:
        self._stream = stream or sys.stdout
        self._colour = self._stream.isatty() and not os.environ.get("NO_COLOR")
        self._rich = RichConsole(file=self._stream) if self._stream.isatty() else None
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

    def stage(self, name: str, stage: str, done: bool = False) -> None:
        """A part of the fleet has come to this stage; `done` ends its clock."""
        now = time.monotonic()
        _, since, until = self._rows.get(name, ("", now, None))
        if until is not None:
            since = now  # it had come to an end, and begins again
        self._rows[name] = (stage, since, now if done else None)
        if self._live is None:
            took = f" after {now - since:.1f} s" if done and now - since >= 0.1 else ""
            self._write(f"{name}: {stage}{took}")

    def say(self, text: str) -> None:
        """A line of the launcher's own."""
        self._write(text)

    def log(self, name: str, line: str) -> None:
        """A line of one of the fleet's processes."""
        prefix = f"[{name}]"
        if self._colour:
            prefix = f"\x1b[{_COLOURS.get(name.partition('-')[0], 34)}m{prefix}\x1b[0m"
        self._write(f"{prefix} {line}")

    def _write(self, line: str) -> None:
        try:
            if self._live is not None:
                self._live.console.print(Text.from_ansi(line), soft_wrap=True)
            else:
                self._stream.write(line + "\n")
                self._stream.flush()
        except (BrokenPipeError, ValueError):
            self._stream = open(os.devnull, "w")  # the fleet matters more than who watches it

    def _table(self) -> Table:
        table = Table.grid(padding=(0, 2))
        now = time.monotonic()
        for name, (stage, since, until) in self._rows.items():
            mark = Text("✓", style="green") if until is not None else Spinner("dots")
            table.add_row(mark, name, stage, f"{(until or now) - since:.0f} s")
        return table


class ConsoleHandler(logging.Handler):
    """The launcher's own log, among the others'."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._console.log("launcher", self.format(record))
        except Exception:  # logging's contract: a line that cannot be formatted must not end the program
            self.handleError(record)
