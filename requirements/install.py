"""Fills .venv with what a lock names, by uv if it can be had, else by pip: `.venv/bin/python THIS LOCK`.

uv takes a tenth of pip's time. It is the user's own, or one that pip puts into .venv. It knows nothing of pip's
configuration, which may be where this machine's packages are found, so that is passed on. Standard library only.
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

_RUNTIME = "runtime-cpu.lock"  # what the lock of everything includes
UV = "uv==0.13.9"
# Asked only where the configured indexes offer no CPU build of torch.
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# pip's setting, uv's variable for it, and what that one has between two values.
_SETTINGS = (
    ("index-url", "UV_DEFAULT_INDEX", " "),
    ("extra-index-url", "UV_INDEX", " "),
    ("find-links", "UV_FIND_LINKS", ","),
    ("trusted-host", "UV_INSECURE_HOST", " "),
    ("cert", "SSL_CERT_FILE", " "),
    ("proxy", "ALL_PROXY", " "),
)

Install = Callable[..., "subprocess.CompletedProcess[str]"]


def uv_environment(pip_config: str, environment: Mapping[str, str]) -> dict[str, str]:
    """`environment`, and in it, for uv, what `pip config list` has printed. uv's own variables stay as they are."""
    ranks = ("global", "install", ":env:")  # the later overrides the earlier
    settings: dict[str, tuple[int, str]] = {}
    for line in pip_config.splitlines():
        key, _, value = line.partition("=")
        section, _, name = key.rpartition(".")
        if section in ranks and value:
            settings[name] = max(settings.get(name, (0, "")), (ranks.index(section), str(ast.literal_eval(value))))
    told = {
        variable: between.join(settings[name][1].split())
        for name, variable, between in _SETTINGS
        if name in settings and settings[name][1].strip()
    }
    # As pip: a version may be in any of the indexes, not only in the first that knows the package.
    return {"UV_INDEX_STRATEGY": "unsafe-best-match", **told, **environment}


def by_pip(*arguments: str, quiet: bool = False) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "-q", "install", "--no-deps"]
    return subprocess.run([*command, *arguments], stderr=subprocess.PIPE if quiet else None, text=True)


def by_uv(uv: str) -> Install:
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], stdout=subprocess.PIPE, text=True).stdout
    environment = uv_environment(listed, os.environ)

    def install(*arguments: str, quiet: bool = False) -> subprocess.CompletedProcess[str]:
        command = [uv, "pip", "install", "-q", "--python", sys.executable, "--no-deps", *arguments]
        return subprocess.run(command, stderr=subprocess.PIPE if quiet else None, env=environment, text=True)

    return install


def find_uv() -> str | None:
    """The user's own, or one that pip puts beside the interpreter. None, and says why, where there can be none."""
    own = Path(sys.executable).with_name("uv")
    found = shutil.which("uv") or shutil.which(own)
    if found is None:
        added = by_pip(UV, quiet=True)
        if added.returncode != 0:
            said = added.stderr.strip().splitlines() or ["no message"]
            why = next((line for line in said if line.startswith("ERROR")), said[-1])
            say(f"pip installs, which takes some minutes: {UV} cannot be had ({why})")
            return None
        found = str(own)
    return found


def fill(lock: Path, install: Install) -> bool:
    """Install what the lock names; with the lock of everything, the CPU build of torch before it and this project
    after it. The installer's errors are shown."""
    if _RUNTIME not in lock.read_text():
        return install("-r", str(lock)).returncode == 0
    runtime = lock.with_name(_RUNTIME).read_text().splitlines()
    (torch,) = [line for line in runtime if line.startswith("torch==")]
    # Of torch the default index has the build for CUDA, which is some gigabytes.
    if install(torch, quiet=True).returncode != 0:
        if install("--index-url", TORCH_CPU_INDEX, torch).returncode != 0:
            say(f"{torch} is in no configured index, and not in {TORCH_CPU_INDEX}")
            return False
    return all(install(*what).returncode == 0 for what in (["-r", str(lock)], ["--no-build-isolation", "-e", "."]))


def say(line: str) -> None:
    print(f"install: {line}", flush=True)


def main(lock: Path) -> int:
    """Returns an exit code."""
    started = time.monotonic()
    say(f"{lock} into .venv, once")
    uv = find_uv()
    filled = uv is not None and fill(lock, by_uv(uv))
    if not filled:
        if uv is not None:
            say(f"{uv} could not: pip installs, which takes some minutes")
        filled = fill(lock, by_pip)
    if not filled:
        return 1
    say(f"done in {time.monotonic() - started:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
