"""vLLM's tests, from the source distribution that its package index offers; kept in the cache folder.

Only what the tests import is unpacked. vLLM's code itself is not: the installed one is what is tested.
"""

import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from unearth import PackageFinder

from orchestrator.config.model import cache_root

VERSION = "0.32.0"
_PARTS = ("tests/", "examples/")
_PYPI = "https://pypi.org/simple"


def unpacked_tests() -> Path:
    """The folder that holds vLLM's `tests`; fetched once. Raises LookupError when no index offers it."""
    folder = cache_root() / f"vllm-{VERSION}-tests"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    print(f"fetching the source distribution of vLLM {VERSION} once, for its tests", flush=True)
    with tempfile.TemporaryDirectory(prefix=f"{folder.name}.tmp-", dir=folder.parent) as temporary:
        archive, target = _fetch(Path(temporary)), Path(temporary) / "unpacked"
        with tarfile.open(archive) as tar:
            for member in tar:
                _, _, inside = member.name.partition("/")
                if member.isfile() and inside.startswith(_PARTS):
                    member.name = inside
                    tar.extract(member, target, filter="data")
        target.rename(folder)
    return folder


def _fetch(folder: Path) -> Path:
    """The archive, whose sha256 is the one that the index names."""
    finder = PackageFinder(index_urls=_indexes(), no_binary=["vllm"], ignore_compatibility=True)
    best = finder.find_best_match(f"vllm=={VERSION}").best
    if best is None or not best.link.hash_option:
        raise LookupError(f"vllm {VERSION}: none of {', '.join(_indexes())} offers its source distribution with a hash")
    # It refuses a file whose hash differs. What it unpacks is of no use here, the archive beside it is.
    finder.download_and_unpack(best.link, folder / "whole", folder)
    return folder / best.link.filename


def _indexes() -> list[str]:
    """Those that pip uses here."""
    pip = [sys.executable, "-m", "pip", "config", "list"]
    lines = subprocess.run(pip, capture_output=True, text=True, check=True).stdout.splitlines()
    settings = dict(line.split("=", 1) for line in lines if "=" in line)
    named = [value.strip("'\"") for key, value in settings.items() if key.endswith(".index-url")]
    return [os.environ.get("PIP_INDEX_URL") or (named[-1] if named else _PYPI)]
