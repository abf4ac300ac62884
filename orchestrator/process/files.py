"""Files that are used only if they are what they should be: those that nobody but this user may have written, which are
made so, and those that somebody names, which are plain ones of a bounded size.

Another user of the machine may put a folder, a file or a link where ours would be, in /tmp for instance, to be sent our
keys or to name the processes that we end. Not responsible for the folders above, which the operator chooses.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import pwd
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

_FOLDER_MODE, _FILE_MODE = 0o700, 0o600
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_ROOT = 0
_LOOK_S = 0.02  # between two looks at a lock that others hold


class Foreign(OSError):
    """Somebody else may have written this path. One line: the path, its owner or mode, and the mend."""


def own_uid() -> int:
    return os.geteuid()


def check_own(path: Path, or_roots: bool = False) -> None:
    """Raises FileNotFoundError where nothing is, and Foreign for a link, for what belongs to another user or what a
    group or others may write. `or_roots`: what belongs to root is as good."""
    _check(path, os.lstat(path), or_roots)


def make_folder(path: Path) -> None:
    """Make it and the missing ones above, for this user only. Raises OSError; Foreign as `check_own` does."""
    if not path.parent.exists():
        make_folder(path.parent)
    with contextlib.suppress(FileExistsError):
        path.mkdir(_FOLDER_MODE)
    check_own(path)
    if not path.is_dir():
        raise NotADirectoryError(f"{path}: is no folder; remove it")


def open_own(path: Path, mode: str = "r", **options: Any) -> IO[Any]:
    """As `open`, for a file in a folder that is ours; a new file is for this user only, and text is UTF-8 whatever the
    locale is. `w` empties a file before it is known to be ours, so use `x` or `write_text`. Raises OSError, Foreign."""
    check_own(path.parent)
    with contextlib.suppress(FileNotFoundError):
        check_own(path)  # `open` would only say that it is denied, or that there is a link
    # A pipe in its place must not make us wait. On a plain file the flag has no effect.
    flags = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    options |= {} if "b" in mode else {"encoding": "utf-8"}
    file = open(path, mode, opener=lambda name, given: os.open(name, given | flags, _FILE_MODE), **options)
    try:
        found = os.fstat(file.fileno())
        _check(path, found)
        if not stat.S_ISREG(found.st_mode):
            raise Foreign(f"{path}: is no plain file; remove it")
    except OSError:
        file.close()
        raise
    return file


def read_text(path: Path) -> str:
    """Raises OSError, Foreign, UnicodeDecodeError."""
    with open_own(path) as file:
        return str(file.read())


def write_text(path: Path, text: str) -> None:
    """Write it anew: others see it as it was or whole, and none but this user can. Raises OSError, Foreign."""
    temporary = path.with_name(f".{path.name}.tmp")
    check_own(path.parent)
    temporary.unlink(missing_ok=True)  # a writer that was killed left it
    with open_own(temporary, "x") as file:
        file.write(text)
    temporary.replace(path)


class Held(BlockingIOError):
    """Others hold a file's lock for longer than was waited."""


@contextlib.contextmanager
def locked(
    path: Path, within_s: float, shared: bool = False, on_wait: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Hold the file's lock, which the kernel releases when this process ends in any way. `on_wait` is called once if
    others hold it. Raises OSError; Held if they do so for longer."""
    deadline, waits = time.monotonic() + within_s, False
    with open_own(path, "a") as lock:
        while True:
            try:
                fcntl.flock(lock, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() >= deadline:
                    raise Held(*error.args) from None
            if not waits:
                waits = True
                on_wait()
            time.sleep(_LOOK_S)
        yield


def _check(path: Path, found: os.stat_result, or_roots: bool = False) -> None:
    if stat.S_ISLNK(found.st_mode):
        raise Foreign(f"{path}: is a link, of {_named(found.st_uid)}; remove it")
    owner, own = found.st_uid, own_uid()
    if owner != own and not (or_roots and owner == _ROOT):
        raise Foreign(
            f"{path}: belongs to {_named(owner)}, and this is {_named(own)}; remove it, or work as {_named(owner)}"
        )
    if found.st_mode & _OTHERS_WRITE:
        raise Foreign(
            f"{path}: others than {_named(owner)} may write it (mode {stat.S_IMODE(found.st_mode):04o}); see whether "
            f"they did, then `chmod go-w {path}`"
        )


def _named(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


CONFIG_BYTES = 262_144  # a YAML file; they have a few KB, and the parser takes seconds for this much
KEYS_BYTES = 16_777_216  # a file of API keys


def check_plain_file(path: str | Path) -> None:
    """Raises OSError for a path that is not a regular file: to read a FIFO or a device may never end."""
    mode = os.stat(path).st_mode
    if stat.S_ISDIR(mode):
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "Not a regular file", str(path))


def read_plain_file(path: str | Path, most_bytes: int) -> str:
    """Raises OSError, also for a file with more than `most_bytes`, and UnicodeDecodeError."""
    check_plain_file(path)
    with open(path, "rb") as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"It has more than {most_bytes} bytes", str(path))
    return content.decode("utf-8-sig")
