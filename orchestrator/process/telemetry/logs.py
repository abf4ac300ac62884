"""One format for all logs of a fleet's processes: lines of text with a date, or one JSON object per line.

Our lines, uvicorn's and vLLM's look the same. The launcher reads the standard error of all processes, and collects
their lines in one file. While it is stopped, by Ctrl-Z say, it reads nothing, as does a terminal that is stopped, and a
process that waited for it would serve nobody: lines that nobody reads are dropped, and counted.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import logging.config
import os
import re
import select
import stat
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, TextIO

import msgspec

LogFormat = Literal["text", "json"]

OURS = "pd"  # the parent of all our loggers
REQUESTS = "pd.request"  # one line per ended request: a `RequestLine` as JSON
# Environment variables that give format and process name to the processes that vLLM starts.
_FORMAT, _PROCESS = "PD_LOG_FORMAT", "PD_LOG_PROCESS"
_VLLM_LOGGING = Path(__file__).with_name("vllm_logging.json")
# As TextFormatter and `common_log_line` begin it: what a client has sent may stand in the middle of another line.
_REQUEST = re.compile(rf"(?:\[\S+\] )?\S+ \S+ [A-Z]+ \S+ {re.escape(REQUESTS)}: (.+)", re.DOTALL)

# It holds the lines of some hundred requests, so that a reader may be late by them. Linux limits the pipes of a user to
# 64 MiB together; above that it makes tiny ones.
_PIPE_BYTES = 1 << 18
_PATIENCE_S = 0.25  # the wait for a slow reader; after a dropped line, nothing waits until a line is written again


class _Configurator(logging.config.DictConfigurator):
    """Python's, but for what all loggers remember being forgotten once, not once for each logger that is set: vLLM has
    thousands, and with them it takes a quarter of a second. Each process sets its logs up twice, by us and by vLLM."""

    def configure(self) -> None:
        with logging._lock:  # type: ignore[attr-defined]  # two threads would take each other's change for Python's own
            forget = logging.Manager._clear_cache  # type: ignore[attr-defined]
            logging.Manager._clear_cache = lambda manager: None  # type: ignore[attr-defined]
            try:
                super().configure()
            finally:
                logging.Manager._clear_cache = forget  # type: ignore[attr-defined]
                forget(logging.root.manager)


logging.config.dictConfigClass = _Configurator  # what dictConfig uses, vLLM's call too


class TextFormatter(logging.Formatter):
    """`2026-01-31 23:59:59.123 INFO worker-1 pd.worker: ready`, local time. What has several lines, as a traceback,
    has all but the first indented: each is read alone, and a client may have written it."""

    default_time_format, default_msec_format = "%Y-%m-%d %H:%M:%S", "%s.%03d"

    def __init__(self, process: str) -> None:
        super().__init__("%(asctime)s %(levelname)s " + process + " %(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        return "\n    ".join(super().format(record).splitlines())


class JsonFormatter(logging.Formatter):
    """Keys: `time` (UTC, ISO 8601), `level`, `process`, `logger` and `message`; `exception` if there is one. The line
    of an ended request has `request` instead of `message`."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, Any] = {"time": at, "level": record.levelname, "process": self._process, "logger": record.name}
        message = record.getMessage()
        if record.name == REQUESTS:
            line["request"] = msgspec.Raw(message.encode())
        else:
            line["message"] = message
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


def formatter(form: LogFormat, process: str) -> logging.Formatter:
    return JsonFormatter(process) if form == "json" else TextFormatter(process)


def environment(process: str, form: LogFormat) -> dict[str, str]:
    """Environment variables that give vLLM's lines this format, in a process and in those that it starts."""
    return {"VLLM_LOGGING_CONFIG_PATH": str(_VLLM_LOGGING), _FORMAT: form, _PROCESS: process}


def set_up(process: str, form: LogFormat, level: str) -> None:
    """Send all logs of this process to its stderr. PD_LOG_LEVEL, if set, replaces `level`."""
    level = os.environ.get("PD_LOG_LEVEL", level).upper()
    for name, value in environment(process, form).items():
        os.environ.setdefault(name, value)
    if os.environ["VLLM_LOGGING_CONFIG_PATH"] == str(_VLLM_LOGGING):  # else an operator has set another file
        logging.config.dictConfig(msgspec.json.decode(_VLLM_LOGGING.read_bytes()))
    handler = logging.StreamHandler(stderr())
    handler.setFormatter(formatter(form, process))
    for name, its_level in ((OURS, level), ("uvicorn", "WARNING")):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.setLevel(its_level)
        logger.propagate = False


class LossyStderr:
    """A text file with the methods that logging needs."""

    def __init__(self, descriptor: int) -> None:
        """`descriptor` must not block."""
        self._descriptor = descriptor
        self._lines_dropped = 0
        self._cut = False  # whether the last line was written in part only
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLOUT)

    def write(self, text: str) -> int:
        note = f"({self._lines_dropped} lines were not logged, since nobody took them)\n" if self._lines_dropped else ""
        data = ("\n" * self._cut + note + text).encode(errors="backslashreplace")
        left = self._write_all(data)
        if left == len(data):
            self._lines_dropped += text.count("\n")
        else:
            self._lines_dropped, self._cut = 0, left > 0
        return len(text)

    def flush(self) -> None:
        """Does nothing: `write` keeps no buffer."""

    def _write_all(self, data: bytes) -> int:
        """Write to the descriptor. Returns how many bytes are left."""
        deadline = time.monotonic() + (0.0 if self._lines_dropped or self._cut else _PATIENCE_S)
        while data:
            try:
                data = data[os.write(self._descriptor, data) :]
            except BlockingIOError:
                if (left_s := deadline - time.monotonic()) <= 0:
                    break
                self._poll.poll(left_s * 1e3)
            except OSError:  # the reader has gone
                break
        return len(data)


def stderr() -> TextIO | LossyStderr:
    """sys.stderr, or a `LossyStderr` file on it if it is a pipe or a terminal."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # there is no stderr, or a test replaced it
        descriptor = sys.stderr.fileno()
        is_pipe = stat.S_ISFIFO(os.fstat(descriptor).st_mode)
        if is_pipe or os.isatty(descriptor):
            # Opened again: processes that share a descriptor share O_NONBLOCK, and others write to this one.
            own = os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
            if is_pipe:
                with contextlib.suppress(OSError):
                    fcntl.fcntl(own, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
            return LossyStderr(own)
    return sys.stderr


def vllm_handler() -> logging.Handler:
    """The handler in `vllm_logging.json`: vLLM's lines in our format, from VLLM_LOGGING_LEVEL (default WARNING) up."""
    logging.getLogger("vllm").setLevel(os.environ.get("VLLM_LOGGING_LEVEL", "WARNING").upper())
    handler = logging.StreamHandler(stderr())
    form: LogFormat = "json" if os.environ.get(_FORMAT) == "json" else "text"
    handler.setFormatter(formatter(form, os.environ.get(_PROCESS, "vllm")))
    handler.addFilter(_tells_no_refusal)
    return handler


def _tells_no_refusal(record: logging.LogRecord) -> bool:
    """vLLM writes a traceback for each stream that is refused before it begins, though its exception says that it is an
    answer (`GracefulHTTPError`). Of 429 under overload there are hundreds a second."""
    return not (record.exc_info and hasattr(record.exc_info[1], "http_status"))


def common_log_line(form: LogFormat, process: str, line: str) -> str:
    """A process's line for the common file. With format JSON, a line that is not JSON becomes a message."""
    if form == "text":
        return f"[{process}] {line}"
    if line.startswith('{"time":'):
        return line
    at = datetime.now(UTC).isoformat(timespec="milliseconds")
    return msgspec.json.encode({"time": at, "process": process, "message": line}).decode()


def request_in(line: str) -> str | bytes | None:
    """The encoded `RequestLine` in a line of either format; None for any other line."""
    if line.startswith("{"):
        try:
            return bytes(msgspec.json.decode(line, type=_Logged).request) or None
        except (msgspec.DecodeError, RecursionError):
            return None
    return found[1] if (found := _REQUEST.match(line)) else None


class _Logged(msgspec.Struct):
    request: msgspec.Raw = msgspec.Raw()
