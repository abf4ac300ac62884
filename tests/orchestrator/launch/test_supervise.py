"""Supervision of real child processes: output, restarts with growing pauses, ends that leave nothing."""

import asyncio
import errno
import gc
import os
import signal
import sys
from unittest.mock import AsyncMock, Mock

import pytest
from support_wait import until

from orchestrator.config.settings import LauncherConfig
from orchestrator.launch import supervise
from orchestrator.launch import supervise as supervise_module
from orchestrator.launch.host import process as process_module
from orchestrator.launch.host.process import (
    _MAX_LINE_BYTES,
    LocalProcess,
    ProcessGroup,
    ProcessSpec,
    adopt_orphans,
    group_alive,
)
from orchestrator.launch.machines import OnLine
from orchestrator.launch.supervise import SUCCESSORS, Exit, Stage, Supervised, backoff_s, describe
from orchestrator.process.parent import _FINAL, ALIVE, started_ticks

FAST = LauncherConfig(restart_backoff_max_s=0.05, stop_timeout_s=1.0)


@pytest.fixture(autouse=True)
def reaping():
    adopt_orphans()


def python(code: str, name: str = "child") -> ProcessSpec:
    return ProcessSpec(name, [sys.executable, "-c", code])


def alone(spec: ProcessSpec, on_line: OnLine) -> ProcessGroup:
    return ProcessGroup([LocalProcess(spec, on_line)])


class Child:
    """A supervised program and everything it said and went through."""

    def __init__(
        self,
        code: str,
        config: LauncherConfig = FAST,
        start_timeout_s: float = 30.0,
        spec: ProcessSpec | None = None,
    ) -> None:
        self.lines: list[str] = []
        self.stages: list[Stage] = []
        self.exits: list[Exit] = []
        self.process = Supervised(
            "child",
            lambda: alone(spec or python(code), lambda name, line: self.lines.append(line)),
            config,
            start_timeout_s,
            lambda process: self.stages.append(process.stage),
            self._left,
        )
        self.task = asyncio.create_task(self.process.run())

    async def _left(self, process: Supervised) -> None:
        assert process.last_exit is not None
        self.exits.append(process.last_exit)

    async def ended(self) -> None:
        await self.task

    async def stop(self) -> None:
        self.process.request_stop()
        await self.ended()


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(supervise, "BACKOFF_S", 0.01)


def test_pauses_double_up_to_their_limit(monkeypatch):
    monkeypatch.setattr(supervise, "BACKOFF_S", 0.5)
    config = LauncherConfig(restart_backoff_max_s=30)
    assert [backoff_s(n, config) for n in (1, 2, 3, 4)] == [0.5, 1, 2, 4]
    assert backoff_s(50, config) == backoff_s(5000, config) == 30


@pytest.mark.parametrize(("longest_pause_s", "healthy_s"), [(1.5, 60.0), (300.0, 1.5)])
async def test_crashes_are_forgotten_after_a_healthy_time(monkeypatch, longest_pause_s, healthy_s):
    monkeypatch.setattr("orchestrator.launch.supervise._HEALTHY_S", healthy_s)
    config = LauncherConfig(restart_backoff_max_s=longest_pause_s, stop_timeout_s=1.0)
    child = Child("import time; print('up', flush=True); time.sleep(60)", config)
    for crashes in (1, 2, 3):
        await until(lambda n=crashes: len(child.lines) == n)
        child.process.mark_ready()
        child.process.kill()
        await until(lambda n=crashes: len(child.exits) == n)
        assert child.process.crashes == crashes, "in a row"
    await until(lambda: len(child.lines) == 4)
    child.process.mark_ready()
    await asyncio.sleep(1.6)
    child.process.kill()
    await until(lambda: len(child.exits) == 4 and child.process.stage is not Stage.READY)
    assert child.process.crashes == 1
    await child.stop()


async def test_missing_program_waits_longest_pause():
    slow = LauncherConfig(restart_backoff_max_s=300.0)
    child = Child("", slow, spec=ProcessSpec("child", ["/nowhere/bin/python", "-m", "workers.main"]))
    await until(lambda: child.process.stage is Stage.PAUSING)
    (end,) = child.exits
    assert end.final and "/nowhere/bin/python cannot be run on" in end.reason and "`python`" in end.reason
    await child.stop()


async def test_crashed_process_restarts_until_stopped():
    child = Child("import sys; print('worker-like: no luck', file=sys.stderr); sys.exit(3)")
    await until(lambda: len(child.exits) >= 3)
    assert child.process.crashes >= 2
    assert child.exits[0] == Exit(3, "worker-like: no luck", was_ready=False)
    await child.stop()
    assert child.stages[:3] == [Stage.STARTING, Stage.PAUSING, Stage.STARTING]
    assert child.stages[-1] is Stage.ENDED


async def test_a_kill_is_a_crash_and_the_next_start_has_another_process():
    child = Child("import time; print('up', flush=True); time.sleep(60)")
    await until(lambda: child.lines)
    first = child.process.pid
    child.process.mark_ready()
    os.kill(first, signal.SIGKILL)
    await until(lambda: len(child.lines) == 2)
    assert child.process.pid not in (0, first)
    assert child.exits == [Exit(-9, "up", was_ready=True)]
    assert "killed by signal 9" in describe(child.exits[0])
    await child.stop()
    assert child.process.pid == 0 and started_ticks(first) is None


async def test_process_that_left_in_order_is_not_restarted():
    code = "import signal, sys\nsignal.signal(15, lambda *a: sys.exit(0))\nprint('up', flush=True)\nsignal.pause()"
    child = Child(code)
    await until(lambda: child.lines)
    child.process.mark_ready()
    os.kill(child.process.pid, signal.SIGTERM)
    await child.ended()
    assert child.exits == [Exit(0, "up", was_ready=True)]


async def test_expected_exit_is_awaited_and_enforced():
    child = Child("import time; print('up', flush=True); time.sleep(60)")
    await until(lambda: child.lines)
    child.process.mark_ready()
    child.process.expect_exit(0.05)
    assert child.process.stage is Stage.LEAVING
    await child.ended()
    assert len(child.exits) == 1


async def test_process_that_is_never_ready_is_restarted():
    child = Child("import time; print('up', flush=True); time.sleep(60)", start_timeout_s=0.3)
    await until(lambda: len(child.exits) == 1)
    assert not child.exits[0].was_ready
    said = "was killed by signal 15 (not ready within 0.3 s, of workers.start_timeout_s)"
    assert describe(child.exits[0]) == said, "whoever waits for it reads why"
    await until(lambda: len(child.lines) >= 2)
    await child.stop()


async def test_a_stop_in_the_pause_ends_it_at_once(monkeypatch):
    monkeypatch.setattr(supervise, "BACKOFF_S", 300.0)
    child = Child("import sys; sys.exit(1)", LauncherConfig(restart_backoff_max_s=300))
    await until(lambda: child.process.stage is Stage.PAUSING)
    child.process.expect_exit(0)
    await child.ended()


async def test_stopping_one_that_ignores_it_kills_its_whole_group():
    code = (
        "import os, signal, time\nsignal.signal(15, signal.SIG_IGN)\nos.write(1, b'%d\\n' % os.fork())\ntime.sleep(60)"
    )
    lines: list[str] = []
    process = LocalProcess(python(code), lambda name, line: lines.append(line))
    await process.start()
    await until(lambda: len(lines) == 2)
    grandchild = max(map(int, lines))
    await process.stop(0.1)
    assert not process.running and not group_alive(process.pid)
    assert started_ticks(grandchild) is None


async def test_what_has_ended_is_not_signalled_any_more(monkeypatch: pytest.MonkeyPatch):
    """Its pid, and its group's, may be another's by then: of one that waits for its next start, say."""
    process = LocalProcess(python("pass"), lambda name, line: None)
    await process.start()
    await process.wait()
    signalled: list[int] = []
    for name in ("kill", "killpg"):
        monkeypatch.setattr(os, name, lambda pid, number: signalled.append(pid))
    process.kill()
    process.signal(signal.SIGTERM)
    await process.stop(1.0)
    assert not signalled


async def test_lines_of_any_length_arrive_and_progress_bars_as_their_last_state():
    code = "import sys; sys.stdout.write('x' * 200_000 + '\\n' + '10%\\r50%\\r100%\\n' + '\\n' + 'no newline')"
    lines: list[str] = []
    process = LocalProcess(python(code), lambda name, line: lines.append(line))
    await process.start()
    assert await process.wait() == 0
    assert "".join(lines[:-2]).replace(" ", "") == "x" * 200_000
    assert lines[-2:] == ["100%", "no newline"]


@pytest.mark.parametrize("rest", ["2026-01-31 23:59:59.123 INFO f pd.request: {}", f"10%\r{ALIVE}", f"{_FINAL}no"])
async def test_the_rest_of_a_long_line_is_no_line_of_its_own(rest: str):
    """A client may have written it."""
    lines: list[str] = []
    process = LocalProcess(python(""), lambda name, line: lines.append(line))
    output = asyncio.StreamReader()
    output.feed_data(b"x" * (_MAX_LINE_BYTES + 1))
    reading = asyncio.create_task(process._read(output, Mock()))
    await until(lambda: lines)
    output.feed_data(f"{rest}\nnext\n".encode())
    output.feed_eof()
    await reading
    assert lines[1:] == ["    " + rest.rpartition("\r")[2], "next"]
    assert process.exit_reason is None and not process.told_alive_at


async def test_exit_reason_goes_before_last_output():
    code = (
        "import sys; from orchestrator.process.parent import report_exit;"
        "report_exit('worker', 'model: no\\n such folder', final=False); print('noise at exit'); sys.exit(2)"
    )
    child = Child(code)
    await until(lambda: child.exits)
    assert child.exits[0] == Exit(2, "model: no such folder", was_ready=False, said=True)
    assert describe(child.exits[0]) == "ended with exit code 2 (model: no such folder)"
    assert child.lines[:2] == ["worker: model: no such folder", "noise at exit"]
    await child.stop()


async def test_final_exit_waits_longest_pause():
    report = "report_exit('worker', 'no such model', final=True)"
    code = f"from orchestrator.process.parent import report_exit; {report}; exit(2)"
    child = Child(code, LauncherConfig(restart_backoff_max_s=300))
    await until(lambda: child.process.stage is Stage.PAUSING)
    assert child.exits == [Exit(2, "no such model", was_ready=False, said=True, final=True)]
    await asyncio.sleep(0.2)  # many times the first pause
    assert len(child.exits) == 1 and child.process.stage is Stage.PAUSING
    await child.stop()


@pytest.mark.parametrize(
    "error", [FileNotFoundError(2, "none", "/gone/metrics"), RuntimeError("no new thread")], ids=str
)
async def test_whatever_keeps_it_from_being_started_is_a_crash(error: Exception, caplog: pytest.LogCaptureFixture):
    process = Supervised("child", Mock(side_effect=error), FAST, 30.0, Mock(), AsyncMock())
    task = asyncio.create_task(process.run())
    await until(lambda: process.crashes >= 2)
    assert process.last_exit is not None and process.last_exit.reason == str(error)
    assert ("child: could not be started" in caplog.text) == isinstance(error, RuntimeError), "a defect is shown whole"
    process.request_stop()
    await task


async def test_a_process_of_which_nobody_can_read_who_it_is_runs_no_more(monkeypatch: pytest.MonkeyPatch):
    pids: list[int] = []

    def no_descriptor(pid: int) -> str:
        pids.append(pid)
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(process_module, "identity_of", no_descriptor)
        child = Child("import time; time.sleep(60)")
        await until(lambda: len(child.exits) >= 2)
    assert "Too many open files" in child.exits[0].reason
    await until(lambda: child.process.pid)
    assert [started_ticks(pid) for pid in pids] == [None] * len(pids)
    await child.stop()


async def test_a_start_that_fails_leaves_no_descriptor_open(monkeypatch: pytest.MonkeyPatch):
    async def full(*_: object) -> None:
        raise OSError(errno.ENOMEM, "full")

    monkeypatch.setattr(asyncio.get_running_loop(), "connect_read_pipe", full)
    gc.collect()
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="full"):
        await LocalProcess(python("pass"), Mock()).start()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == len(before)


async def test_a_process_may_end_with_any_code():
    child = Child("print('a shell says this'); raise SystemExit(127)")
    await until(lambda: child.exits)
    assert child.exits[0] == Exit(127, "a shell says this", was_ready=False)
    await child.stop()


async def test_a_process_without_room_waits_and_can_be_told_to_leave():
    stages: list[Stage] = []
    room = asyncio.Event()
    exits: list[Exit | None] = []

    async def place() -> None:
        await room.wait()

    async def left(process: Supervised) -> None:
        exits.append(process.last_exit)

    def supervised() -> tuple[Supervised, asyncio.Task[None]]:
        child = Supervised(
            "child",
            lambda: alone(python("import time; time.sleep(60)"), lambda name, line: None),
            FAST,
            30.0,
            lambda process: stages.append(process.stage),
            left,
            place,
        )
        return child, asyncio.create_task(child.run())

    process, task = supervised()
    await until(lambda: process.stage is Stage.PLACING)
    assert process.pid == 0
    room.set()
    await until(lambda: process.pid)
    assert process.stage is Stage.STARTING and exits == []
    process.request_stop()
    room.clear()
    waiting, its_task = supervised()
    await until(lambda: waiting.stage is Stage.PLACING)
    waiting.expect_exit(within_s=60)
    await asyncio.gather(task, its_task)
    assert len(exits) == 1, "the one without a process had nothing to leave"
    assert stages[-1] is Stage.ENDED


async def test_one_whose_start_takes_long_is_stopped_at_once(monkeypatch: pytest.MonkeyPatch):
    begun, given_up = asyncio.Event(), asyncio.Event()

    async def start(process: LocalProcess) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            given_up.set()

    monkeypatch.setattr(LocalProcess, "start", start)
    child = Child("")
    await begun.wait()
    await child.stop()
    assert given_up.is_set()
    assert child.stages == [Stage.STARTING, Stage.ENDED]


async def test_one_that_has_no_process_yet_leaves_at_once(monkeypatch: pytest.MonkeyPatch):
    """Before it is known whether it has to wait for room, too."""
    monkeypatch.setattr(supervise_module, "_PLACED_AT_ONCE_S", 0.2)
    stages: list[Stage] = []

    async def left(process: Supervised) -> None:
        raise AssertionError("nothing ran")

    def make() -> ProcessGroup:
        raise AssertionError("nothing is to run")

    child = Supervised("child", make, FAST, 30.0, lambda p: stages.append(p.stage), left, asyncio.Event().wait)
    task = asyncio.create_task(child.run())
    await until(lambda: stages == [Stage.STARTING])
    child.expect_exit(within_s=60)
    await task
    assert stages == [Stage.STARTING, Stage.LEAVING, Stage.ENDED]


async def test_one_that_tells_that_it_lives_is_not_hung_though_the_registry_does_not_have_it():
    """Its connection to Redis is cut. It told so by a line that nobody is shown."""
    tells = "from orchestrator.process.parent import tell_alive; import time; time.sleep({}); tell_alive(); "
    child = Child(tells.format(0.5) + "time.sleep(2.5); tell_alive(); time.sleep(60)")
    await until(lambda: child.process.pid)
    pid = child.process.pid
    child.process.mark_ready()
    for heard in range(2):
        await until(lambda heard=heard: len(child.lines) > heard)
        child.process.missed(100.0, timeout_s=0.5)
        assert child.process.pid == pid and child.process.last_lines == []
    await asyncio.sleep(1)
    child.process.missed(0.5, timeout_s=0.2)
    assert child.process.pid == pid, "for so long the registry has not been looked at"
    child.process.missed(100.0, timeout_s=0.2)
    await until(lambda: child.exits)
    assert child.exits[0].code == -signal.SIGKILL, "it has told nothing for long"
    await child.stop()


async def test_one_that_has_loaded_and_waits_for_redis_is_not_late():
    tells = "from orchestrator.process.parent import tell_alive; import time"
    child = Child(f"{tells}\nfor _ in range(30): tell_alive(); time.sleep(0.1)", start_timeout_s=1.0)
    await until(lambda: child.exits)
    assert child.exits[0].code == 0, "it ended by itself"
    await child.stop()


def test_every_stage_has_successors_and_an_end():
    assert set(SUCCESSORS) == set(Stage)
    assert [stage for stage in Stage if not SUCCESSORS[stage]] == [Stage.ENDED]
    assert all(Stage.ENDED in SUCCESSORS[stage] for stage in Stage if stage is not Stage.ENDED)


async def test_one_that_readings_of_the_registry_miss_is_hung_and_started_again():
    child = Child("import time; time.sleep(60)")
    await until(lambda: child.process.pid)
    first = child.process.pid
    child.process.missed(100.0, timeout_s=1.0)  # it loads: it need not be there yet
    child.process.mark_ready()
    child.process.missed(3.0, timeout_s=1.0)
    child.process.seen()
    child.process.missed(3.0, timeout_s=1.0)
    await asyncio.sleep(0.1)
    assert child.process.pid == first and child.exits == []
    child.process.missed(3.0, timeout_s=1.0)
    await until(lambda: child.process.pid not in (0, first))
    assert child.exits[0].code == -signal.SIGKILL
    await child.stop()


async def test_one_that_hangs_while_it_leaves_is_ended_long_before_it_would_have_to_have_left():
    child = Child("import time; time.sleep(60)")
    await until(lambda: child.process.pid)
    child.process.mark_ready()
    child.process.expect_exit(within_s=60)
    child.process.missed(3.0 + FAST.stop_timeout_s, timeout_s=1.0)  # it may have left the registry, and end
    await asyncio.sleep(0.1)
    assert child.exits == []
    child.process.missed(2.0, timeout_s=1.0)
    await child.ended()
    assert [end.code for end in child.exits] == [-signal.SIGKILL], "and not started again"


STAYS = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); signal.pause()"
LEAVES_ONE = f"import signal, subprocess, sys; subprocess.Popen([sys.executable, '-c', {STAYS!r}]); signal.pause()"


@pytest.mark.parametrize("stays", ["the process", "one of its group"])
async def test_a_process_that_outlives_sigkill_holds_nobody_up(monkeypatch, caplog, stays):
    """As one that waits for a device: its fleet ends all the same, and says so."""
    monkeypatch.setattr(process_module, "ENDS_WITHIN_S", 0.3)
    monkeypatch.setattr(process_module, "_GROUP_PATIENCE_S", 0.1)
    child = Child(STAYS if stays == "the process" else LEAVES_ONE, LauncherConfig(stop_timeout_s=0.1))
    await until(lambda: "up" in child.lines, "it runs")
    pid = child.process.pid or child.process.parts[0].pid
    with monkeypatch.context() as patched:
        patched.setattr(process_module.os, "killpg", lambda group, number: None)
        await child.stop()
    assert child.process.stage is Stage.ENDED and not child.process.pid
    assert f"child (process {pid}) has not ended within 0.3 s of SIGKILL" in caplog.text
    assert [part.lost for part in child.process.parts] == [stays == "the process"]
    os.killpg(pid, signal.SIGKILL)
    await until(lambda: not group_alive(pid), "it is gone")
