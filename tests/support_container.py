"""A pod's container without a container runtime: namespaces, a read-only root as of an image, a nameless user."""

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil
import pytest
from support_wait import DEADLINE_S

ROOT = Path(__file__).parents[1]
DOCKERFILE = ROOT / "deploy" / "Dockerfile"
USER = 54321
# Read-only, as in an image: the system, Python, its packages and our code.
IMAGE = ("/usr", "/opt", sys.base_prefix, str(Path(sys.prefix).resolve()), str(ROOT))
LINKS = ("/bin", "/lib", "/lib64", "/sbin")


def can_contain() -> bool:
    """Whether this process may make namespaces and mounts."""
    if os.geteuid() != 0 or not shutil.which("unshare") or not shutil.which("setpriv"):
        return False
    tried = ["unshare", "--mount", "--pid", "--fork", "mount", "-t", "tmpfs", "none", "/mnt"]
    return subprocess.run(tried, capture_output=True, timeout=DEADLINE_S).returncode == 0


def image_environment() -> dict[str, str]:
    """What the Dockerfile sets."""
    (block,) = re.findall(r"^ENV ((?:.*\\\n)*.*)$", DOCKERFILE.read_text(), re.MULTILINE)
    return dict(word.split("=", 1) for word in block.replace("\\\n", " ").split())


class Container:
    """A process whose namespace ends with it. `volumes`: host folders by mount point, None for an empty one."""

    def __init__(
        self,
        command: list[str],
        environment: Mapping[str, str],
        volumes: Mapping[str, Path | None],
        entrypoint: list[str],
        log: Path,
    ) -> None:
        self.log = log
        settings = [f"{name}={value}" for name, value in environment.items()]
        inside = [
            "chroot",
            "$root",
            "setpriv",
            f"--reuid={USER}",
            f"--regid={USER}",
            "--clear-groups",
            "--no-new-privs",
        ]
        inside += ["--bounding-set=-all", "env", "-i", "--chdir=/", *settings, *entrypoint, *command]
        script = "\n".join([*self._mounts(volumes), "exec " + " ".join(map(_quoted, inside))])
        with log.open("w") as output:
            self.process = subprocess.Popen(
                ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-ec", script],
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    @staticmethod
    def _mounts(volumes: Mapping[str, Path | None]) -> Iterator[str]:
        yield "mount --make-rprivate /; root=/mnt; mount -t tmpfs none $root"
        for path in LINKS:
            yield f"[ ! -e {path} ] || cp -a {path} $root/"
        for path in dict.fromkeys(IMAGE):
            yield f"mkdir -p $root{path}; mount --bind {path} $root{path}; mount -o remount,bind,ro $root{path}"
        yield "mkdir -p $root/proc $root/sys $root/dev $root/tmp $root/etc; mount -t proc proc $root/proc"
        yield "mount --rbind /sys $root/sys; mount --rbind /dev $root/dev"
        # Without passwd and group: the user has no name.
        yield "cp -aL /etc/ssl /etc/resolv.conf /etc/hosts /etc/ld.so.cache /etc/nsswitch.conf $root/etc/ || :"
        for path, host in volumes.items():
            source = "-t tmpfs -o mode=1777 none" if host is None else f"--bind {host}"
            yield f"mkdir -p $root{path}; mount {source} $root{path}"
        yield "mount -o remount,ro $root"

    @property
    def main(self) -> psutil.Process:
        """The process with pid 1 in there."""
        deadline = time.monotonic() + 30
        while not (children := psutil.Process(self.process.pid).children()):  # unshare has not forked yet
            assert self.process.poll() is None and time.monotonic() < deadline, self.lines()
            time.sleep(0.01)
        (first,) = children
        return first

    def terminate(self) -> None:
        """As a kubelet does: SIGTERM to pid 1."""
        self.main.send_signal(signal.SIGTERM)

    def exit_code(self, timeout_s: float) -> int:
        return self.process.wait(timeout_s)

    def lines(self) -> list[str]:
        return self.log.read_text(errors="replace").splitlines()

    def end(self) -> None:
        if self.process.poll() is None:
            with contextlib.suppress(psutil.NoSuchProcess, ValueError):
                self.main.kill()
            self.process.kill()
            self.process.wait(30)


def _quoted(word: str) -> str:
    return word if word == "$root" else shlex.quote(word)


def wait_until(condition: object, what: str, timeout_s: float, *containers: Container) -> None:
    """`condition` is called until it is true. Fails at once when one of the containers has ended."""
    assert callable(condition)
    deadline = time.monotonic() + timeout_s
    while not condition():
        for container in containers:
            if container.process.poll() is not None:
                pytest.fail(
                    f"{container.log.stem} ended with {container.process.returncode}: {container.lines()[-20:]}"
                )
        assert time.monotonic() < deadline, f"{what}; {[c.lines()[-10:] for c in containers]}"
        time.sleep(0.1)
