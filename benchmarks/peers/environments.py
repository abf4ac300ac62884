"""A Python environment for each peer, which pip makes once in this project's cache folder."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from orchestrator.config.model import cache_root

INSTALL_TIMEOUT_S = 900.0


class PeerError(RuntimeError):
    """A peer cannot run. The text is one line with the peer and the reason. The other peers are still measured."""


@dataclass(frozen=True)
class Peer:
    """`alone`: packages that are installed without their dependencies; `packages` has those that are needed."""

    version: str
    packages: tuple[str, ...] = ()
    alone: tuple[str, ...] = ()


PEERS = {
    "vllm-router": Peer("0.1.17", ("vllm-router==0.1.17",)),
    "smg": Peer("1.13.0", ("smg==1.13.0",)),
    # One dependency is a placeholder on PyPI that cannot be installed; frontend and mocker do not need it.
    "dynamo": Peer(
        "1.6.1",
        ("aiohttp", "msgspec", "prometheus-client", "pyzmq", "redis", "tqdm", "transformers", "zstandard", "uvloop")
        + ("kubernetes", "pydantic"),
        alone=("ai-dynamo==1.6.1", "ai-dynamo-runtime==1.6.1"),
    ),
}


def programs(name: str) -> Path:
    """The folder of a peer's programs. Installs the peer if it is missing. Raises PeerError."""
    peer = PEERS[name]
    place = cache_root() / "peers" / f"{name}-{peer.version}"
    if not (place / "complete").exists():
        shutil.rmtree(place, ignore_errors=True)
        print(f"{name} {peer.version}: installing into {place}", flush=True)
        _run(name, [sys.executable, "-m", "venv", str(place)])
        pip = [str(place / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--no-input", "install", "-q"]
        if peer.alone:
            _run(name, [*pip, "--no-deps", *peer.alone])
        _run(name, [*pip, *peer.packages])
        (place / "complete").touch()
    return place / "bin"


def _run(name: str, command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise PeerError(
            f"{name}: not installed within {INSTALL_TIMEOUT_S:g} s; is a package index reachable?"
        ) from None
    if done.returncode:
        words = [line for line in done.stderr.splitlines() if "error" in line.lower()] or ["pip gave no reason"]
        raise PeerError(f"{name}: pip cannot install it: {words[0].strip()}")
