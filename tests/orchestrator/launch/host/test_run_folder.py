"""The run folder: one launcher per namespace, told apart from what a killed one left."""

import errno
import logging
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
from support_wait import DEADLINE_S

from orchestrator.config.settings import ConfigError, parse_config
from orchestrator.launch.host import leftovers, run_folder
from orchestrator.launch.host.leftovers import SharedMemory, end_processes, remove_shared_memory, shared_memory_of
from orchestrator.launch.host.process import group_alive
from orchestrator.launch.host.run_folder import (
    FleetRunning,
    Ready,
    RunFolder,
    StartedProcess,
    abandoned_namespaces,
    held_namespaces,
)
from orchestrator.process.parent import has_ended, identity_of, local_pid, started_ticks


@pytest.fixture(autouse=True)
def own_base(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def test_one_launcher_per_namespace():
    first = RunFolder("a")
    assert first.claim() == []
    assert held_namespaces() == ["a"] and RunFolder("a").is_held
    with pytest.raises(FleetRunning, match=r"namespace 'a' is already served by process \d+.*orchestrator down"):
        RunFolder("a").claim()
    other = RunFolder("b")
    other.claim()
    assert held_namespaces() == ["a", "b"]
    for folder in (first, other):
        folder.remove()
    assert not first.path.exists() and held_namespaces() == []


def test_a_full_disk_is_said_and_what_was_not_written_is_written_once_there_is_room(monkeypatch, caplog):
    folder = RunFolder("a")
    folder.claim()
    old, new = (parse_config({"model": name, "namespace": "a", "redis": {"url": "redis://h:1"}}) for name in "mn")
    folder.write_config(old)
    folder.note_started([StartedProcess("decode-0", "here/1/1")])
    write = run_folder.write_text

    def no_room(path, text):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(run_folder, "write_text", no_room)
    with pytest.raises(ConfigError, match=r"/a: cannot be written \(No space left on device\); free space there"):
        folder.write_config(new, 1)
    folder.note_started([StartedProcess("decode-0", "here/2/2")])
    assert "cannot be written" in caplog.text
    assert RunFolder("a").config() == old
    monkeypatch.setattr(run_folder, "write_text", write)
    folder.note_started([StartedProcess("decode-0", "here/2/2")])
    assert "here/2/2" in (folder.path / "processes.json").read_text()
    file = folder.write_config(new, 1)
    assert RunFolder("a").config() == new and file.exists()


def test_what_several_models_run_is_written_down_together():
    folder = RunFolder("a")
    folder.claim()
    for model, names in (("a", {"x"}), ("b", {"y"})):
        folder.note_started([StartedProcess(f"{model}-worker-0", "here/1/1")], frozenset(names), model)
    assert [process.name for process in folder._read_list("processes.json", list[StartedProcess])] == [
        "a-worker-0",
        "b-worker-0",
    ]
    assert folder.shared_memory == {"x", "y"}
    folder.note_started([], frozenset(), "a")
    assert "a-worker-0" not in (folder.path / "processes.json").read_text() and folder.shared_memory == {"y"}
    folder.forget_model("b")
    folder.note_started([], frozenset(), "a")
    assert (folder.path / "processes.json").read_text() == "[]"


def test_a_disk_that_is_full_when_a_fleet_starts_is_named_and_the_folder_removed(tmp_path):
    """A process's limit on the size of files stands for the disk: both refuse to write to a file that is open."""
    code = """
import resource, signal, sys
from orchestrator.launch.host.run_folder import RunFolder
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
folder = RunFolder("a")
try:
    folder.claim()
finally:
    folder.remove()
"""
    done = subprocess.run([sys.executable, "-B", "-c", code], capture_output=True, text=True)
    assert "ConfigError" in done.stderr.splitlines()[-1], done.stderr
    assert "/a: cannot be written (File too large); free space there, or" in done.stderr
    assert not (tmp_path / "pd-orchestrator" / "a").exists()


def test_written_files_are_readable():
    folder = RunFolder("a")
    folder.claim()
    config = parse_config({"model": "m", "namespace": "a", "redis": {"url": "redis://:secret@h:1"}})
    file = folder.write_config(config)
    folder.note_ready(Ready("http://h:1", "m", "1P1D"))
    other = RunFolder("a")
    assert other.config() == config
    assert other.redis_url() == "redis://:secret@h:1"
    assert other.ready() == Ready("http://h:1", "m", "1P1D")
    assert file.parent.stat().st_mode & 0o077 == 0, "passwords are in it"
    folder.remove()
    assert other.redis_url() is None and other.ready() is None


@pytest.mark.parametrize("lost", ["all", "one file", "the lock"])
def test_deleted_files_are_written_again(tmp_path, lost):
    folder = RunFolder("a")
    folder.claim()
    folder.write_config(parse_config({"model": "m", "namespace": "a", "redis": {"url": "redis://h:1"}}))
    folder.note_ready(Ready("http://h:1", "m", "1P1D"))
    folder.note_started([StartedProcess("decode-0", "here/1/1")])
    if lost == "all":
        shutil.rmtree(folder.path.parent)
    else:
        (folder.path / {"one file": "redis.url", "the lock": "launcher"}[lost]).unlink()
    folder.note_started([StartedProcess("decode-0", "here/2/2")])
    other = RunFolder("a")
    assert other.is_held and local_pid(other.launcher() or "") == local_pid(folder.launcher() or "") == os.getpid()
    assert (other.redis_url(), other.ready()) == ("redis://h:1", folder.ready())
    assert "here/2/2" in (folder.path / "processes.json").read_text()
    with pytest.raises(FleetRunning):
        other.claim()
    folder.remove()
    assert not folder.path.exists()


def test_folder_taken_by_another_launcher_is_left_alone(caplog):
    first, second = RunFolder("a"), RunFolder("a")
    first.claim()
    shutil.rmtree(first.path)
    second.claim()
    with caplog.at_level(logging.ERROR, "pd.launcher"):
        first.note_started([])
        first.note_started([])
    assert len(caplog.messages) == 1 and "already served" in caplog.text
    first.remove()
    assert second.is_held and second.path.exists()
    second.remove()


def test_a_folder_that_cannot_be_written_does_not_end_the_fleet(tmp_path, monkeypatch, caplog):
    folder = RunFolder("a")
    folder.claim()
    shutil.rmtree(folder.path.parent)
    folder.path.parent.write_text("a file is in its place")
    with caplog.at_level(logging.ERROR, "pd.launcher"):
        folder.note_started([])
    assert "cannot be written" in caplog.text
    folder.remove()


def test_a_full_disk_ends_no_rollout_and_no_fleet(tmp_path, monkeypatch, caplog):
    folder, config = RunFolder("a"), parse_config({"model": "m", "namespace": "a", "redis": {"url": "redis://h:1"}})
    folder.claim()
    folder.write_config(config)
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with monkeypatch.context() as patched:
        patched.setattr("orchestrator.launch.host.run_folder.write_text", Mock(side_effect=full))
        folder.note_ready(Ready("http://h:1", "m", "1P1D"))
        folder.note_started([])
        assert "No space left" in caplog.text and folder.ready() is None
        with pytest.raises(ConfigError, match="No space left.*free space there"):
            folder.write_config(config, 1)
    folder.note_started([])
    assert folder.ready() == Ready("http://h:1", "m", "1P1D")
    folder.remove()


def test_who_holds_a_folder_is_told_once_there_is_room(monkeypatch):
    """`orchestrator down` finds the launcher by that."""
    folder = RunFolder("a")
    folder.claim()
    launcher = folder.launcher()
    (folder.path / "launcher").unlink()  # as a cleaner of temporary files does
    with monkeypatch.context() as patched:
        patched.setattr(run_folder.os, "write", Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
        folder.note_started([])
    assert folder.is_held and folder.launcher() is None
    folder.note_started([])
    assert folder.launcher() == launcher is not None
    folder.remove()


@pytest.mark.parametrize("name", ["..", ".", "../x", "a/b", "a\n", "", "-x", ".hidden"])
def test_a_namespace_cannot_leave_its_folder(name):
    with pytest.raises(ConfigError, match="namespace"):
        RunFolder(name)
    with pytest.raises(ConfigError, match="namespace"):
        parse_config({"model": "demo", "namespace": name})


CLAIM_AND_DIE = """
import os, signal, subprocess, sys
from orchestrator.process.parent import identity_of
from orchestrator.launch.host.run_folder import RunFolder, StartedProcess
folder = RunFolder("a")
folder.claim()
program = [sys.executable, "-c", "import time; time.sleep(60)"]
child = subprocess.Popen(program, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
folder.note_started([StartedProcess("worker", identity_of(child.pid))], {"psm_a"})
(folder.path / "socket").touch()
(folder.path / "metrics").mkdir()
(folder.path / "metrics" / "counter_7.db").touch()
print(child.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_processes_of_killed_launcher_are_ended():
    killed = subprocess.run([sys.executable, "-c", CLAIM_AND_DIE], capture_output=True, text=True, timeout=DEADLINE_S)
    orphan = int(killed.stdout)
    assert started_ticks(orphan) is not None
    folder = RunFolder("a")
    assert not folder.is_held and abandoned_namespaces() == ["a"]
    left = folder.claim()
    assert [process.name for process in left] == ["worker"]
    assert folder.shared_memory == {"psm_a"}
    assert not (folder.path / "socket").exists() and not (folder.path / "metrics").exists()
    assert end_processes(left, patience_s=5) == ["worker"]
    assert started_ticks(orphan) is None
    folder.remove()


def test_launcher_killed_while_it_cleans_up_leaves_the_list_to_the_next():
    killed = subprocess.run([sys.executable, "-c", CLAIM_AND_DIE], capture_output=True, text=True, timeout=DEADLINE_S)
    claim = "from orchestrator.launch.host.run_folder import RunFolder; import os; RunFolder('a').claim(); os._exit(9)"
    assert subprocess.run([sys.executable, "-c", claim], timeout=DEADLINE_S).returncode == 9
    folder = RunFolder("a")
    left = folder.claim()
    assert folder.shared_memory == {"psm_a"}
    assert end_processes(left, patience_s=5) == ["worker"] and started_ticks(int(killed.stdout)) is None
    folder.note_started([])
    folder.remove()


def test_reused_pid_is_left_alone():
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    try:
        place, pid, ticks = identity_of(bystander.pid).split("/")
        for other in (f"{place}/{pid}/{int(ticks) - 1}", f"another-container/{pid}/{ticks}"):
            assert end_processes([StartedProcess("worker", other)], patience_s=0.1) == []
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_process_that_outlives_sigkill_is_logged(monkeypatch, caplog):
    """One that waits for a device or a network file system."""
    monkeypatch.setattr(leftovers.os, "killpg", lambda group, number: None)
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    try:
        left = [StartedProcess("decode-0", identity_of(sleeper.pid))]
        assert end_processes(left, patience_s=0.1) == ["decode-0"]
        assert "decode-0 (" in caplog.text and "has not ended within 0.1 s of SIGKILL" in caplog.text
    finally:
        monkeypatch.undo()
        sleeper.kill()
        sleeper.wait()


def test_only_recorded_unused_shared_memory_is_removed(tmp_path):
    """Another container may have made the rest: nobody here sees who maps it."""
    for name in ("psm_dead", "psm_used", "psm_of_another_container"):
        (tmp_path / name).write_bytes(b"x")
    with (tmp_path / "psm_used").open() as used:
        assert remove_shared_memory(["psm_dead", "psm_used", "psm_gone"], folder=tmp_path) == ["psm_dead"]
        assert used.read() == "x"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["psm_of_another_container", "psm_used"]


def wait_until_ended(group: int) -> None:
    deadline = time.monotonic() + 15
    while group_alive(group):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_shared_memory_of_group_is_mapped_or_open(tmp_path):
    code = (
        "import mmap, subprocess, sys, time; f = open('psm_mapped', 'r+b'); m = mmap.mmap(f.fileno(), 1); f.close();"
        "h = open('notes.txt'); subprocess.Popen([sys.executable, '-c', 'import time; f = open(\"psm_of_child\");"
        " print(1, flush=True); time.sleep(60)']); time.sleep(60)"
    )
    for name in ("psm_mapped", "psm_of_child", "psm_of_nobody", "notes.txt"):
        (tmp_path / name).write_bytes(b"x")
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=tmp_path, stdout=subprocess.PIPE, start_new_session=True
    )
    try:
        assert process.stdout is not None and process.stdout.readline()
        assert shared_memory_of({process.pid}, folder=tmp_path) == {process.pid: {"psm_mapped", "psm_of_child"}}
        other = shared_memory_of({process.pid + 1}, folder=tmp_path)  # there may be one, of another program
        assert not other.get(process.pid + 1)
        seen = SharedMemory(tmp_path)
        seen.scan({process.pid})
        assert seen.names == {"psm_mapped", "psm_of_child"}
        assert seen.remove_files_of(process.pid + 1) == []
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
    wait_until_ended(process.pid)
    assert seen.remove_files_of(process.pid) == ["psm_mapped", "psm_of_child"] and not seen.names
    assert (tmp_path / "psm_of_nobody").exists(), "another container's, for all that can be known here"


def test_names_that_are_no_text_end_no_launcher(tmp_path):
    """A process may have any bytes as its name, and map files of any."""
    for name in (b"psm_own", b"other_\xff"):
        (tmp_path / os.fsdecode(name)).write_bytes(b"x")
    code = (
        "import mmap, os; open('/proc/self/comm', 'wb').write(b'\\xff'); "
        "files = [open(name, 'r+b') for name in (b'psm_own', b'other_\\xff')]; "
        "maps = [mmap.mmap(file.fileno(), 1) for file in files]; "
        "print(flush=True); input()"
    )
    command = [sys.executable, "-c", code]
    process = subprocess.Popen(
        command, cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdout is not None and process.stdout.readline()
    try:
        assert shared_memory_of({process.pid}, tmp_path)[process.pid] == {"psm_own"}
        assert not has_ended(identity_of(process.pid))
    finally:
        process.communicate(b"\n", timeout=DEADLINE_S)


def test_shared_memory_of_living_process_is_kept(tmp_path):
    """Between two processes that hand it over, a file may be mapped by nobody for a moment."""
    (tmp_path / "psm_shared").write_bytes(b"x")
    seen = SharedMemory(tmp_path)
    code = "f = open('psm_shared'); print(1, flush=True); input()"
    both = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=tmp_path,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        for _ in range(2)
    ]
    for process in both:
        assert process.stdout is not None and process.stdout.readline()
    seen.scan({process.pid for process in both})
    for process in both:
        process.communicate(b"\n", timeout=DEADLINE_S)
    assert seen.remove_files_of(both[0].pid) == []
    assert seen.remove_files_of(both[1].pid) == ["psm_shared"]


def test_a_semaphore_that_waits_for_a_starting_rank_is_kept():
    """Its maker maps it under the name that it had before it was complete."""
    lock = multiprocessing.get_context("spawn").Lock()
    name = f"sem.{lock._semlock.name.lstrip('/')}"
    assert (Path("/dev/shm") / name).exists()
    assert name in shared_memory_of({os.getpgid(0)})[os.getpgid(0)]
    assert remove_shared_memory([name]) == []
    assert (Path("/dev/shm") / name).exists()
