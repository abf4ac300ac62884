"""Processes that are forked from one that has imported their modules: what they are, and when they are not forked."""

import asyncio
import errno
import os
import queue
import signal
import subprocess
import sys
import threading
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest
from support_wait import DEADLINE_S, until

from orchestrator.launch.host import fork_servers
from orchestrator.launch.host.fork_servers import Forkable, ForkServers
from orchestrator.launch.host.process import LocalProcess, ProcessSpec, adopt_orphans
from orchestrator.process.parent import started_ticks
from orchestrator.process.tasks import cancelled

TELLS = """
import heavy, os, sys
print(sys.argv[1:], heavy.imported_by == os.getpid(), os.environ.get("OWN"), os.environ.get("CUDA_VISIBLE_DEVICES"))
print("parent", os.getppid(), "session", os.getsid(0) == os.getpid(), "main", __name__, os.environ.get("SET_BY_IMPORT"))
sys.exit(int(sys.argv[1]))
"""
ENDS = """
import atexit, heavy, os, sys, threading, time

class Part:
    def __del__(self, write=os.write):
        write(1, b"taken apart\\n")

sys.part = Part()  # as long as there is an interpreter
atexit.register(print, "at exit")
threading.Thread(target=lambda: (time.sleep(0.2), print("a thread"))).start()
sys.exit("text" if sys.argv[1] == "text" else int(sys.argv[1]))
"""
HEAVY = "import os\nimported_by = os.getpid()\nos.environ['SET_BY_IMPORT'] = 'yes'\n"


@pytest.fixture
def modules(tmp_path: Path):
    """Two modules in a folder: `heavy`, which takes long to import, and `tells`, which imports it."""
    (tmp_path / "heavy.py").write_text(HEAVY)
    (tmp_path / "tells.py").write_text(TELLS)
    (tmp_path / "waits.py").write_text("import heavy, time\nprint('waits', flush=True)\ntime.sleep(600)\n")
    adopt_orphans()
    return tmp_path


@pytest.fixture
def forks():
    servers = ForkServers()
    yield servers
    servers.close()


class Run:
    """A process of a module in the folder, and what it said."""

    imports: tuple[str, ...] = ("heavy",)
    needs = 1

    def __init__(self, folder: Path, forks: ForkServers, module: str, *arguments: str, **env: str) -> None:
        self.lines: list[str] = []
        program = Forkable((sys.executable,), module, arguments, self.imports, self.needs)
        path = os.pathsep.join([str(folder), *sys.path])
        spec = ProcessSpec(module, program.command, {"PYTHONPATH": path, **env}, forkable=program)
        self.process = LocalProcess(spec, lambda name, line: self.lines.append(line), forks)

    async def ended(self) -> int:
        await self.process.start()
        return await self.process.wait()

    @property
    def was_forked(self) -> bool:
        return " False " in self.lines[0]  # another process has imported `heavy`


async def test_a_forked_process_is_as_one_that_was_executed(modules: Path, forks: ForkServers):
    forked = Run(modules, forks, "tells", "0", "more", OWN="a", CUDA_VISIBLE_DEVICES="1")
    executed = Run(modules, None, "tells", "0", "more", OWN="a", CUDA_VISIBLE_DEVICES="1")
    assert [await forked.ended(), await executed.ended()] == [0, 0]
    assert (forked.was_forked, executed.was_forked) == (True, False)
    assert forked.lines[0].replace(" False ", " True ") == executed.lines[0] == "['0', 'more'] True a 1"
    assert forked.lines[1] == executed.lines[1] == f"parent {os.getpid()} session True main __main__ yes"


@pytest.mark.parametrize(("given", "told"), [("3", "3"), ("2,1", "2"), ("0", "none"), ("many", "none"), ("", "none")])
async def test_threads_are_those_that_its_environment_asks_for(
    modules: Path, forks: ForkServers, given: str, told: str
):
    (modules / "torch.py").write_text("threads = 'none'\ndef set_num_threads(n):\n    global threads; threads = n\n")
    (modules / "heavy.py").write_text("import torch\n")
    (modules / "tells.py").write_text("import torch\nprint(torch.threads)\n")
    run = Run(modules, forks, "tells", OMP_NUM_THREADS=given)
    assert await run.ended() == 0 and run.lines == [told]


async def test_exit_codes_and_signals_are_told(modules: Path, forks: ForkServers):
    assert await Run(modules, forks, "tells", "7").ended() == 7
    waiting = Run(modules, forks, "waits")
    await waiting.process.start()
    await until(lambda: waiting.lines == ["waits"])
    title = " ".join(psutil.Process(waiting.process.pid).cmdline())
    assert title.strip().endswith("-m waits"), "`ps` shows what it runs"
    await waiting.process.stop(5)
    assert await waiting.process.wait() == -signal.SIGTERM
    assert not waiting.process.running


@pytest.mark.parametrize(("given", "code"), [("0", 0), ("7", 7), ("text", 1)])
async def test_a_forked_process_ends_as_python_does_and_is_not_taken_apart(
    modules: Path, forks: ForkServers, given: str, code: int
):
    (modules / "ends.py").write_text(ENDS)
    forked, executed = (Run(modules, how, "ends", given) for how in (forks, None))
    assert [await forked.ended(), await executed.ended()] == [code, code]
    assert executed.lines[-1] == "taken apart"
    assert forked.lines == (executed.lines if given == "text" else executed.lines[:-1])


async def test_modules_are_imported_once_for_each_environment_that_they_may_read(modules: Path, forks: ForkServers):
    runs = [Run(modules, forks, "tells", "0", **env) for env in ({}, {"CUDA_VISIBLE_DEVICES": "3"}, {"OWN": "b"})]
    assert [await run.ended() for run in runs] == [0, 0, 0]
    assert all(run.was_forked for run in runs)
    assert [run.lines[0].split()[-2:] for run in runs] == [["None", "None"], ["None", "3"], ["b", "None"]]
    assert len(forks._servers) == 2, "the device is a process's own; any other variable may be read by an import"


async def test_a_forked_process_that_cannot_be_watched_is_ended(
    modules: Path, forks: ForkServers, monkeypatch: pytest.MonkeyPatch
):
    """It would run unseen beside the one that is executed in its place."""
    pids: list[int] = []

    def no_descriptor(pid: int) -> None:
        pids.append(pid)
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(fork_servers, "ForkedProcess", no_descriptor)
    waiting = Run(modules, forks, "waits")
    await waiting.process.start()
    assert len(pids) == 1 and waiting.process.pid not in pids
    await until(lambda: started_ticks(pids[0]) is None)
    await waiting.process.stop(5)


async def test_a_module_that_has_changed_is_imported_again(modules: Path, forks: ForkServers):
    assert await Run(modules, forks, "tells", "0").ended() == 0
    (modules / "heavy.py").write_text(HEAVY.replace("yes", "anew"))
    later = os.stat(modules / "heavy.py").st_mtime_ns + 3_600_000_000_000  # no import is under way then
    os.utime(modules / "heavy.py", ns=(later, later))
    changed = Run(modules, forks, "tells", "0")
    assert await changed.ended() == 0
    assert changed.was_forked and changed.lines[1].endswith("anew")


@pytest.mark.parametrize("imports", [("heavy",), ("heavy", "heavier")])
async def test_a_module_that_changes_while_it_or_another_is_imported_counts_as_changed(
    modules: Path, forks: ForkServers, monkeypatch: pytest.MonkeyPatch, imports: tuple[str, ...]
):
    changes = f"import os, pathlib\nos.utime({str(modules / 'heavy.py')!r})\n"
    (modules / imports[-1]).with_suffix(".py").write_text(changes + HEAVY)
    monkeypatch.setattr(Run, "imports", imports)
    monkeypatch.setattr(Run, "needs", len(imports))
    run = Run(modules, forks, "tells", "0")
    assert await run.ended() == 0
    assert not run.was_forked, "what was imported may not be what is there, twice"


@pytest.mark.parametrize("asked_first", [False, True])
async def test_it_is_forked_once_what_it_needs_is_imported(
    modules: Path, forks: ForkServers, monkeypatch: pytest.MonkeyPatch, asked_first: bool
):
    """What another needs is imported later, also where that was asked for first."""
    monkeypatch.setattr(Run, "imports", ("heavy", "heavier"))
    wait = "import pathlib, time\nwhile not pathlib.Path({!r}).exists():\n    time.sleep(0.01)\n"
    asked, later = modules / "asked", modules / "later"
    (modules / "heavy.py").write_text(HEAVY + wait.format(str(asked)))
    (modules / "heavier.py").write_text(wait.format(str(later)))
    early = Run(modules, forks, "tells", "0")
    monkeypatch.setattr(Run, "needs", 2)
    late = Run(modules, forks, "tells", "5")
    ending = [asyncio.create_task(it.ended()) for it in ((late, early) if asked_first else (early,))]
    await until(lambda: [len(it._asked) for it in forks._servers.values()] == [len(ending)], "it is asked for")
    asked.touch()
    assert await ending[-1] == 0 and early.was_forked
    ended = ending[0] if asked_first else asyncio.create_task(late.ended())
    later.touch()
    assert await ended == 5


async def test_who_waits_for_more_modules_while_one_has_changed_is_forked_from_the_next_server(
    modules: Path, forks: ForkServers, monkeypatch: pytest.MonkeyPatch
):
    """Another order, which needs less, is told of the change first, and the server ends with it."""
    monkeypatch.setattr(Run, "imports", ("heavy", "heavier"))
    asked, before = modules / "asked", modules / "before"
    (modules / "heavy.py").write_text(
        f"{HEAVY}import pathlib, time\nasked, before = map(pathlib.Path, ({str(asked)!r}, {str(before)!r}))\n"
        "while not asked.exists():\n    time.sleep(0.01)\n"
        "if first := not before.exists():\n    before.touch()\n    os.utime(__file__)\n"
    )
    (modules / "heavier.py").write_text("import heavy, time\nif heavy.first:\n    time.sleep(600)\n")
    early = Run(modules, forks, "tells", "0")
    monkeypatch.setattr(Run, "needs", 2)
    late = Run(modules, forks, "tells", "5")
    ending = [asyncio.create_task(it.ended()) for it in (early, late)]
    await until(lambda: [len(it._asked) for it in forks._servers.values()] == [2], "both have asked")
    asked.touch()
    assert await asyncio.gather(*ending) == [0, 5]
    assert early.was_forked and late.was_forked


async def test_what_cannot_be_imported_is_executed_and_says_so(modules: Path, forks: ForkServers):
    (modules / "heavy.py").write_text("raise RuntimeError('no such device')")
    for _ in range(2):
        failing = Run(modules, forks, "tells", "0")
        assert await failing.ended() == 1
        assert failing.lines[-1] == "RuntimeError: no such device"
    assert forks._servers == {}, "it is not tried again"


async def test_where_orphans_are_not_adopted_it_is_executed(modules: Path, forks: ForkServers):
    adopt_orphans(False)
    try:
        for _ in range(2):
            executed = Run(modules, forks, "tells", "0")
            assert await executed.ended() == 0
            assert not executed.was_forked and len(executed.lines) == 2
    finally:
        adopt_orphans()


async def test_where_the_end_of_a_process_cannot_be_watched_it_is_executed(
    modules: Path, forks: ForkServers, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(os, "pidfd_open", Mock(side_effect=OSError(errno.ENOSYS, "not here")))
    executed = Run(modules, forks, "tells", "0")
    assert await executed.ended() == 0
    assert not executed.was_forked and forks._servers == {}


@pytest.mark.parametrize("what", [signal.SIGKILL, signal.SIGSTOP])
async def test_without_an_answer_it_is_executed_and_the_next_is_forked(
    modules: Path, forks: ForkServers, what: signal.Signals, monkeypatch: pytest.MonkeyPatch
):
    assert await Run(modules, forks, "tells", "0").ended() == 0
    (server,) = forks._servers.values()
    os.kill(server._process.pid, what)
    monkeypatch.setattr(fork_servers, "IMPORTS_S", 0.5)
    executed = Run(modules, forks, "tells", "0")
    assert await executed.ended() == 0
    assert not executed.was_forked
    monkeypatch.undo()
    forked = Run(modules, forks, "tells", "0")
    assert await forked.ended() == 0
    assert forked.was_forked


async def test_nothing_is_left_of_a_start_that_is_given_up_while_modules_are_imported(
    modules: Path, forks: ForkServers
):
    (modules / "heavy.py").write_text(
        f"import os, time\nwhile not os.path.exists({str(modules / 'go')!r}): time.sleep(0.02)\n"
    )
    before = children_of_this_process()  # those of fixtures
    given_up = Run(modules, forks, "waits")
    starting = asyncio.create_task(given_up.process.start())
    await until(lambda: forks._servers)
    await cancelled(starting)
    assert starting.cancelled() and not given_up.process.running
    (modules / "go").touch()
    other = Run(modules, forks, "tells", "0")
    (modules / "tells.py").write_text("print('told')")
    assert await other.ended() == 0 and other.lines == ["told"]
    (server,) = forks._servers.values()
    await until(lambda: children_of_this_process() - before == {server._process.pid})
    assert given_up.lines == []


async def test_a_fork_server_ends_with_its_launcher(modules: Path):
    forks = ForkServers()
    assert await Run(modules, forks, "tells", "0").ended() == 0
    (server,) = forks._servers.values()
    process = psutil.Process(server._process.pid)
    server._socket.close()  # as the kernel does at the launcher's end
    await asyncio.to_thread(server._process.wait, 60)
    assert not process.is_running()
    forks.close()


async def test_a_fork_server_that_outlives_sigkill_holds_nobody_up(modules: Path):
    forks = ForkServers()
    assert await Run(modules, forks, "tells", "0").ended() == 0
    (server,) = forks._servers.values()
    process, server._process = server._process, Mock(wait=Mock(side_effect=subprocess.TimeoutExpired("x", 5)))
    forks.close()
    process.kill()
    process.wait()


def test_a_forked_process_that_outlives_sigkill_holds_nobody_up(monkeypatch: pytest.MonkeyPatch):
    waits = queue.Queue[threading.Thread]()
    waitpid = Mock(side_effect=lambda *_: waits.put(threading.current_thread()) or (0, 0))
    monkeypatch.setattr(fork_servers, "os", Mock(wraps=os, kill=Mock(), waitpid=waitpid))
    fork_servers._end(1)
    assert waits.get(timeout=DEADLINE_S) is not threading.current_thread()


async def test_a_fork_server_that_outlives_sigkill_does_not_hold_up_the_loop(
    modules: Path, forks: ForkServers, monkeypatch: pytest.MonkeyPatch
):
    """Within that time the launcher's claims on its workers' ids would run out."""
    monkeypatch.setattr(fork_servers, "IMPORTS_S", 0.01)
    monkeypatch.setattr(fork_servers, "_ENDS_WITHIN_S", DEADLINE_S)
    waits, ends = threading.Event(), threading.Event()

    def wait(within_s: float) -> None:
        waits.set()
        ends.wait(within_s)

    run = Run(modules, forks, "tells", "0")
    (modules / "heavy.py").write_text("import time\ntime.sleep(600)\n")
    starting = asyncio.create_task(run.process.start())
    await until(lambda: forks._servers)
    (server,) = forks._servers.values()
    process, server._process = server._process, Mock(wait=wait)
    await until(waits.is_set)
    assert not starting.done()
    ends.set()
    process.kill()
    process.wait()
    await starting
    await run.process.stop(0)


def children_of_this_process() -> set[int]:
    return {child.pid for child in psutil.Process().children()}
