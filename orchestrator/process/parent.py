"""Identities of processes, what tells one to end, and the duties of a child process: to end with its parent, to report
why it ends, and to say that it lives where the registry cannot.

In Python processes a thread watches the parent. A program that is executed next leaves that to the kernel (Linux).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

PARENT = "PD_PARENT"  # environment variable: the parent's pid, to notice a parent that died before this process checked
# The exit code of a process that asks to be started again: nothing is wrong with it (EX_TEMPFAIL of sysexits.h).
EXIT_AGAIN = 75
# Lines for the parent, which nobody is shown: that this process lives, and why it ends, which follows the last two.
ALIVE, _FINAL, _PASSING = "\x05 alive without Redis", "\x05 ends for good: ", "\x05 ends for now: "
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_POLL_S, _INSIST_S = 0.5, 0.2
_libc = ctypes.CDLL(None, use_errno=True)
_told = -1  # a descriptor of standard error for `tell_alive`, of a process that may have too many files open by then


def ending_signals() -> list[signal.Signals]:
    """Those that tell this process to end in order. Under nohup a terminal that is closed ends nothing."""
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, *([] if ignored else [signal.SIGHUP])]


def started_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since boot (proc(5), field 22); None when there is none, or a zombie.
    Raises OSError where this process cannot look, since it has too many files open."""
    try:
        # Its name is any bytes that it has chosen.
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError, PermissionError):  # there is none of ours
        return None
    return None if fields[0] == "Z" else int(fields[19])


def identity_of(pid: int) -> str:
    """An identity of a running process that is unique over machines and containers: place, pid, start time. Host names
    and pids alone repeat: containers have their own, and the kernel reuses pids."""
    return f"{_pid_namespace()}/{pid}/{started_ticks(pid)}"


def own_identity() -> str:
    return identity_of(os.getpid())


def local_pid(identity: str) -> int | None:
    """The pid of this identity; None for a process of another machine or container."""
    place, _, process = identity.partition("/")
    pid = process.partition("/")[0]
    return int(pid) if place == _pid_namespace() and pid.isdigit() else None


def has_ended(identity: str) -> bool:
    """Whether the process ran here and has ended. False also where that cannot be known."""
    with contextlib.suppress(OSError):
        if (pid := local_pid(identity)) is not None:
            ticks = started_ticks(pid)
            return ticks is None or str(ticks) != identity.rpartition("/")[2]
    return False


def _pid_namespace() -> str:
    """This boot of this machine, and its namespace of pids: containers have their own."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}-{os.stat('/proc/self/ns/pid').st_ino}"


class ExitReason(NamedTuple):
    """Why a process ended, as it reported. `final`: it would fail again with the same configuration."""

    text: str
    final: bool


def die_with_parent(stop_timeout_s: float = 0.0) -> None:
    """End this process when its parent ends: by SIGTERM, and by SIGKILL after `stop_timeout_s`. PR_SET_PDEATHSIG would
    not do: it fires when the *thread* that started this process ends (prctl(2))."""
    global _told
    with contextlib.suppress(OSError):
        before, _told = _told, _output()  # that of a process from which this one was forked may lead elsewhere
        if before >= 0:
            os.close(before)
    parent = int(os.environ.get(PARENT) or os.getppid())

    def watch() -> None:
        _wait_for_end(parent)
        if stop_timeout_s > 0:
            times = max(2, round(stop_timeout_s / _INSIST_S))
            for _ in range(times):  # repeated, since a worker drains after the first signal, and no one needs the drain
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(stop_timeout_s / times)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="pd-die-with-parent", daemon=True).start()


def _wait_for_end(parent: int) -> None:
    try:
        process = os.pidfd_open(parent)
    except (AttributeError, OSError):
        pass  # gone already, an older kernel, or not Linux
    else:
        if os.getppid() == parent:  # otherwise the pid may belong to another process by now
            poll = select.poll()
            poll.register(process, select.POLLIN)
            poll.poll()
        os.close(process)
    while os.getppid() == parent:
        time.sleep(_POLL_S)


def kill_with(parent: int) -> None:
    """For `preexec_fn`: the kernel kills the next executed program when the thread that started it ends."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)


def tell_alive() -> None:
    """Tell the parent that this process works though it cannot reach Redis, where it says so otherwise. Call it at each
    heartbeat that failed. Never waits: a parent that reads nothing kills nobody."""
    if PARENT in os.environ:
        with contextlib.suppress(OSError):  # the pipe is full, or the parent is gone
            output = _told if _told >= 0 else _output()
            try:
                os.write(output, f"\n{ALIVE}\n".encode())  # it may follow a line that was cut
            finally:
                if output != _told:
                    os.close(output)


def _output() -> int:
    """Standard error, opened again: others write to the same pipe, and may wait. Raises OSError."""
    return os.open("/proc/self/fd/2", os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)


def report_exit(program: str, reason: str, final: bool) -> None:
    """Print why it ends, as one line, and tell the parent, if any. An empty `program`: its log has it already."""
    line = " ".join(reason.split())
    shown = f"{program}: {line}\n" if program else ""
    if PARENT in os.environ:  # what is told is a line of its own, also after one of others that is not complete
        shown = (shown or "\n") + f"{_FINAL if final else _PASSING}{line}\n"
    with contextlib.suppress(OSError):  # the parent is gone
        sys.stderr.write(shown)  # at once: others write to the same pipe
        sys.stderr.flush()


def exit_reason_in(line: str) -> ExitReason | None:
    """What a process told with this line of its output of why it ends; None for any other line."""
    kind = next((kind for kind in (_FINAL, _PASSING) if line.startswith(kind)), None)
    return ExitReason(line.removeprefix(kind), kind == _FINAL) if kind is not None else None
