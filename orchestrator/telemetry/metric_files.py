"""The files in which the frontends of a host keep their metrics, so that each of them can tell those of all.

prometheus_client opens one for each kind of metric once the first of that kind has a value. Where the run folder was
gone by then, which whoever cleans /tmp may remove, every request failed.
"""

from __future__ import annotations

import os

from prometheus_client import values
from prometheus_client.mmap_dict import MmapedDict


def outlive_their_folder() -> None:
    """From now on the folder is made anew where it is missing. Idempotent."""
    values.MmapedDict = _open  # type: ignore[assignment,misc]


def _open(filename: str, read_mode: bool = False) -> MmapedDict:
    os.makedirs(os.path.dirname(filename), mode=0o700, exist_ok=True)
    return MmapedDict(filename, read_mode)
