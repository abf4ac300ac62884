"""Commands on a machine where another user has put a run folder, a log or a lock where ours would be."""

import fcntl
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support_cli import SIM, refused

from orchestrator.config.settings import ConfigError, parse_config
from orchestrator.launch.host.run_folder import Ready, RunFolder, base_folder
from orchestrator.process import files
from orchestrator.process.parent import identity_of

ANOTHER = 54_321
ASKING = [
    *(["status"], ["top", "--json"], ["scale", "prefill=3"], ["queue"], ["drain", "decode-0"], ["join"], ["events"]),
    *(["logs"], ["trace", "--last"], ["log-level", "DEBUG"]),
]


def by_chown(path: Path) -> Callable[[], None]:
    if os.getuid() != 0:
        pytest.skip("only root can give a file to another user")
    os.chown(path, ANOTHER, -1)
    return lambda: os.chown(path, 0, -1)


def by_mode(path: Path) -> Callable[[], None]:
    mode = path.stat().st_mode
    path.chmod(mode | 0o022)
    return lambda: path.chmod(mode)


def by_link(path: Path) -> Callable[[], None]:
    target = path.rename(path.with_name(f"{path.name}-target"))
    path.symlink_to(target)

    def back() -> None:
        path.unlink()
        target.rename(path)

    return back


WAYS = {"another's": by_chown, "open to others": by_mode, "a link": by_link}


class Laid:
    """A fleet that looks alive: its lock is held, its launcher is a process that must live, its frontend's port and its
    Redis' note who connects."""

    def __init__(self) -> None:
        self.bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        self.ports = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
        frontend, redis = (port.getsockname()[1] for port in self.ports)
        self.folder = RunFolder("default")
        self.folder.claim()
        config = parse_config({"model": "m", "redis": {"url": f"redis://127.0.0.1:{redis}"}})
        self.folder.write_config(config)
        self.folder.note_ready(Ready(f"http://127.0.0.1:{frontend}", "m", "1P1D"))
        (self.folder.path / "launcher").write_text(identity_of(self.bystander.pid))
        self.folder.log_path.write_text("[launcher] a line\n")

    def assert_untouched(self) -> None:
        assert self.bystander.poll() is None, "a process was ended that a foreign file names"
        for port in self.ports:
            port.setblocking(False)
            with pytest.raises(BlockingIOError):
                port.accept()


@pytest.fixture
def laid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Laid]:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("PD_OPERATOR_KEY", "the-operators-key")
    laid = Laid()
    yield laid
    laid.bystander.kill()
    laid.bystander.wait()
    for port in laid.ports:
        port.close()
    laid.folder.remove()


def assert_refused(command: list[str], path: Path) -> None:
    line = refused(*command)
    assert str(path) in line and re.search("belongs to|others than|is a link", line), (command, line)
    assert re.search(r"remove it|chmod go-w", line), (command, line)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("which", ["base", "folder", "launcher"])
def test_down_ends_no_process_that_a_foreign_file_names(laid: Laid, way, which: str):
    path = {"base": laid.folder.path.parent, "folder": laid.folder.path, "launcher": laid.folder.path / "launcher"}[
        which
    ]
    back = way(path)
    try:
        assert_refused(["down"], path)
        assert_refused(["down", "--namespace", "default"], path)
        laid.assert_untouched()
    finally:
        back()


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_no_command_asks_where_a_foreign_folder_says(laid: Laid, way):
    base = laid.folder.path.parent
    back = way(base)
    try:
        for command in ASKING:
            assert_refused(command, base)
        for options in ([], ["--detach"]):
            assert_refused(["up", SIM, *options], base)
        laid.assert_untouched()
    finally:
        back()


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("name", ["redis.url", "config.yaml", "ready.json"])
def test_no_command_asks_where_a_foreign_file_says(laid: Laid, way, name: str):
    way(laid.folder.path / name)
    assert_refused(["status"], laid.folder.path / name)
    laid.assert_untouched()


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_foreign_log_is_not_shown(laid: Laid, way):
    way(laid.folder.log_path)
    assert_refused(["logs"], laid.folder.log_path)
    assert_refused(["trace", "--last"], laid.folder.log_path)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_the_list_of_a_killed_launcher_is_not_believed(laid: Laid, way):
    """`down` ends what it names."""
    assert laid.folder._lock is not None
    fcntl.flock(laid.folder._lock, fcntl.LOCK_UN)  # as the kernel does for a launcher that is killed
    (laid.folder.path / "processes.json").write_text(f'[{{"name":"w","identity":"{identity_of(laid.bystander.pid)}"}}]')
    way(laid.folder.path / "processes.json")
    assert_refused(["down"], laid.folder.path / "processes.json")
    laid.assert_untouched()


def test_all_is_refused_to_another_user(laid: Laid, monkeypatch: pytest.MonkeyPatch):
    """As the case of `chown`, where the tests do not run as root."""
    base = laid.folder.path.parent
    monkeypatch.setattr(files, "own_uid", lambda: ANOTHER)
    for command in (*ASKING, ["down"], ["up", SIM]):
        assert_refused(command, base)
    laid.assert_untouched()


def test_a_launcher_writes_into_no_folder_that_came_while_it_ran(laid: Laid, caplog: pytest.LogCaptureFixture):
    """A cleaner of /tmp removes the folders, and another user is faster than the launcher."""
    base = laid.folder.path.parent
    base.rename(base.with_name("cleaned"))
    laid.folder.path.mkdir(parents=True)
    base.chmod(0o777)
    laid.folder.note_started([])
    assert "cannot be written" in caplog.text and str(base) in caplog.text
    assert list(laid.folder.path.iterdir()) == []
    with pytest.raises(ConfigError):
        RunFolder("default")


def test_the_folder_of_a_ray_node_is_no_fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    files.make_folder(base_folder() / "default@10.0.0.1")
    assert "no fleet runs here" in refused("down")
