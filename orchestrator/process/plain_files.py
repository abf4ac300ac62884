"""Reads files that somebody names: plain ones of a bounded size, so that none makes a process wait or fill memory."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

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
