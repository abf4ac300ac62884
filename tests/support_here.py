"""Programs in processes that are forked from the one that runs the tests: it has imported vLLM already."""

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable
from multiprocessing.context import ForkProcess

from support_wait import DEADLINE_S


def run_here(
    program: Callable[[], object], timeout_s: float = DEADLINE_S, **env: str
) -> subprocess.CompletedProcess[str]:
    """As subprocess.run of a program whose output is captured. `env`: more variables."""
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        forked = start_here(program, output.fileno(), errors.fileno(), **env)
        forked.join(timeout_s)
        forked.kill()
        forked.join()
        output.seek(0)
        errors.seek(0)
        return subprocess.CompletedProcess([], forked.exitcode or 0, output.read(), errors.read())


def start_here(program: Callable[[], object], output: int, errors: int, **env: str) -> ForkProcess:
    """It ends with this process at the latest."""
    forked = multiprocessing.get_context("fork").Process(
        target=_run_here, args=(program, env, output, errors), daemon=True
    )
    forked.start()
    return forked


def _run_here(program: Callable[[], object], env: dict[str, str], output: int, errors: int) -> None:
    os.dup2(output, 1)
    os.dup2(errors, 2)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)
    os.environ |= env
    program()


def as_main(module: str, *arguments: str) -> Callable[[], object]:
    """What `python -m` runs."""

    def program() -> None:
        sys.argv = [module, *arguments]
        sys.modules.pop(module, None)  # which runpy would warn of
        runpy.run_module(module, run_name="__main__", alter_sys=True)

    return program
