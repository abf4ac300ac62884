"""The files in which the frontends of a host keep their metrics, so that each frontend can report those of all.

prometheus_client opens a file for each kind of metric when the first metric of that kind gets a value. If the run
folder was gone by then (a cleaner of /tmp may remove it), every request would fail.
"""

from __future__ import annotations

from pathlib import Path

from prometheus_client import values
from prometheus_client.mmap_dict import MmapedDict

from orchestrator.process.own_files import make_folder


def recreate_missing_folder() -> None:
    """From now on the folder is created again if it is missing. Idempotent."""
    values.MmapedDict = _open  # type: ignore[assignment,misc]


def _open(filename: str, read_mode: bool = False) -> MmapedDict:
    make_folder(Path(filename).parent)
    return MmapedDict(filename, read_mode)
