"""`up --detach`: a launcher in the background, whose start is shown until it is ready or has failed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import IO

from orchestrator.config.settings import Config, ConfigError
from orchestrator.launch.run_folder import FleetRunning, RunFolder

_POLL_S = 0.1
_SIGNAL_WAIT_S = 60.0


def start_detached(config: Config, arguments: list[str]) -> None:
    """`arguments` are those of `up`, without --detach. Raises ConfigError with the launcher's own last line."""
    folder = RunFolder(config.namespace)
    if folder.is_held:
        raise FleetRunning(
            f"namespace {config.namespace!r} is already served by process {folder.launcher_pid()}; end it with "
            f"`orchestrator down --namespace {config.namespace}`, or choose another: --set namespace=NAME"
        )
    log_file = folder.make_log()
    with log_file.open("w+b", buffering=0) as log, log_file.open("rb") as shown:
        launcher = subprocess.Popen(
            [sys.executable, "-m", "orchestrator.cli.main", "up", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            start_new_session=True,
        )
        try:
            _show_until_ready(launcher, folder, shown)
        except KeyboardInterrupt:
            launcher.terminate()
            launcher.wait(_SIGNAL_WAIT_S)
            raise
    print(f"runs on as process {launcher.pid}; log: {log_file}; end it with `orchestrator down`", flush=True)


def _show_until_ready(launcher: subprocess.Popen[bytes], folder: RunFolder, shown: IO[bytes]) -> None:
    last = b""
    while True:
        # Looked at before the log is read, so that what was written before it is shown.
        ended, ready = launcher.poll() is not None, folder.ready() is not None
        for line in shown.readlines():
            last = line.strip() or last
            if not (ended and line.startswith(b"orchestrator: ")):
                sys.stdout.write(line.decode(errors="replace"))
        sys.stdout.flush()
        if ended:
            said = last.decode(errors="replace").removeprefix("orchestrator: ")
            raise ConfigError(said or f"the launcher ended with exit code {launcher.returncode} and said nothing")
        if ready:
            return
        time.sleep(_POLL_S)
