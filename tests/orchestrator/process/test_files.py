"""Files that another user may have written: each kind of them is refused, and none is made so."""

import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator.process import files
from orchestrator.process.files import Foreign, check_own, make_folder, open_own, read_text, write_text

ANOTHER = 54_321


@pytest.fixture(autouse=True)
def loose_umask():
    """Of a user whose group shares: what is made without a mode may be written by the group."""
    before = os.umask(0o002)
    yield
    os.umask(before)


def linked(path: Path) -> None:
    target = path.rename(path.with_name(f"{path.name}-target"))
    path.symlink_to(target)


def given_away(path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can give a file to another user")
    os.chown(path, ANOTHER, -1)


SPOILED = {
    "link": (linked, "is a link"),
    "group": (lambda path: path.chmod(path.stat().st_mode | 0o020), r"others than \w+ may write it .*chmod go-w"),
    "others": (lambda path: path.chmod(path.stat().st_mode | 0o002), r"others than \w+ may write it .*chmod go-w"),
    "another's": (given_away, f"belongs to user {ANOTHER}, and this is .*; remove it, or work as user {ANOTHER}"),
}
each_kind = pytest.mark.parametrize("spoil, said", SPOILED.values(), ids=SPOILED)


@each_kind
@pytest.mark.parametrize("which", ["file", "folder"])
def test_what_others_may_have_written_is_neither_read_nor_written(
    tmp_path: Path, spoil: Callable[[Path], None], said: str, which: str
):
    folder = tmp_path / "run"
    make_folder(folder)
    write_text(file := folder / "f", "ours")
    spoil(file if which == "file" else folder)
    for use in (lambda: read_text(file), lambda: open_own(file, "a")):
        with pytest.raises(Foreign, match=said):
            use()
    if which == "folder":
        for use in (lambda: make_folder(folder), lambda: write_text(file, "new"), lambda: open_own(folder / "g", "x")):
            with pytest.raises(Foreign, match=said):
                use()
        assert not (folder / "g").exists()
    else:
        target = file.resolve()
        write_text(file, "new")  # in a folder of ours it takes the place of what was there
        assert read_text(file) == "new" and (target == file or target.read_text() == "ours")


def test_files_of_an_injected_user_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As the case with root's `chown`, where the tests run as somebody else."""
    make_folder(tmp_path / "run")
    write_text(tmp_path / "run" / "f", "text")
    monkeypatch.setattr(files, "own_uid", lambda: ANOTHER)
    with pytest.raises(Foreign, match=f"run: belongs to .*, and this is user {ANOTHER}; remove it, or work as "):
        read_text(tmp_path / "run" / "f")


def test_roots_files_are_as_good_where_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(files, "_ROOT", os.geteuid())
    monkeypatch.setattr(files, "own_uid", lambda: ANOTHER)
    check_own(tmp_path, or_roots=True)
    with pytest.raises(Foreign):
        check_own(tmp_path)


def test_what_is_made_is_for_this_user_only(tmp_path: Path):
    make_folder(tmp_path / "a" / "b")
    write_text(tmp_path / "a" / "b" / "f", "x")
    open_own(tmp_path / "a" / "b" / "g", "x").close()
    made = list((tmp_path / "a").rglob("*"))
    assert len(made) == 3
    assert {stat.S_IMODE(path.stat().st_mode) for path in made} == {0o700, 0o600}


def test_a_pipe_in_the_place_of_a_file_holds_up_nobody(tmp_path: Path):
    os.mkfifo(tmp_path / "f", 0o600)
    with pytest.raises(Foreign, match="is no plain file"):
        read_text(tmp_path / "f")


def test_a_file_that_a_killed_writer_left_is_replaced(tmp_path: Path):
    (tmp_path / ".f.tmp").write_text("half")
    write_text(tmp_path / "f", "whole")
    assert [path.name for path in tmp_path.iterdir()] == ["f"] and read_text(tmp_path / "f") == "whole"


def test_a_file_is_not_written_through_a_link(tmp_path: Path):
    (tmp_path / "mine").write_text("precious")
    (tmp_path / "run").mkdir(0o700)
    (tmp_path / "run" / "w").symlink_to(tmp_path / "mine")
    write_text(tmp_path / "run" / "w", "why")
    assert (tmp_path / "mine").read_text() == "precious"


def test_text_is_utf8_whatever_the_locale_is(tmp_path: Path):
    """A configuration is read by other processes, some of them on hosts with another locale."""
    program = "import sys; from pathlib import Path; from orchestrator.process.files import read_text, write_text; "
    program += "path = Path(sys.argv[1]); write_text(path, 'mod\\xe8le \\u6f22'); print(ascii(read_text(path)))"
    without_utf8 = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    told = subprocess.run(
        [sys.executable, "-c", program, tmp_path / "x"], env=without_utf8, capture_output=True, text=True, check=False
    )
    assert told.stdout == "'mod\\xe8le \\u6f22'\n", told.stderr
    assert (tmp_path / "x").read_text("utf-8") == "mod\xe8le \u6f22"
