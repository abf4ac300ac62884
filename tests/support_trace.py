"""Which of our functions every process of a fleet runs, in which phase of a test.

`tracing(folder)` makes child processes import this package's modules through a loader that reports each function's
first call in each phase. Costs one set look-up per call and needs no debugger, so vLLM itself runs at full speed; a
forked process goes on reporting.
"""

import ast
import builtins
import contextlib
import importlib.machinery
import mmap
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
_FOLDER = "TRACE_FOLDER"  # not PD_...: a fork server must have it when it imports
_PHASE, _CALLS = "phase", "calls"
_REPORT = "__pd_report__"
_PACKAGES = ("orchestrator", "workers", "connectors")


class Call(NamedTuple):
    phase: int
    file: str  # relative to the repository's root
    function: str  # its name and first line


class Trace:
    """The test's side."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        (folder / _PHASE).write_bytes(b"\0")
        (folder / _CALLS).touch()
        (folder / "sitecustomize.py").write_text("import support_trace\nsupport_trace.install()\n")

    def enter(self, phase: int) -> None:
        with (self._folder / _PHASE).open("r+b") as file:
            file.write(bytes([phase]))

    def calls(self) -> set[Call]:
        lines = (self._folder / _CALLS).read_text().splitlines()
        return {Call(int(phase), file, function) for phase, file, function in (line.split(" ") for line in lines)}


@contextlib.contextmanager
def tracing(folder: Path) -> Iterator[Trace]:
    """Processes started inside report to the trace."""
    trace = Trace(folder)
    path = os.pathsep.join([str(folder), str(Path(__file__).parent), str(ROOT)])
    changed = {"PYTHONPATH": path, _FOLDER: str(folder)}
    before = {name: os.environ.get(name) for name in changed}
    os.environ.update(changed)
    try:
        yield trace
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


# ---- the traced processes' side --------------------------------------------------------------------------------------


def install() -> None:
    """Called by `sitecustomize` at the start of every child process."""
    folder = Path(os.environ[_FOLDER])
    with (folder / _PHASE).open("rb") as file:
        phase = mmap.mmap(file.fileno(), 1, access=mmap.ACCESS_READ)  # shared by all processes
    calls = os.open(folder / _CALLS, os.O_WRONLY | os.O_APPEND)  # appending a short line is atomic
    seen: set[tuple[int, str]] = set()

    def report(function: str) -> None:
        key = (phase[0], function)
        if key not in seen:
            seen.add(key)
            os.write(calls, f"{key[0]} {function}\n".encode())

    setattr(builtins, _REPORT, report)
    details = (_ReportingLoader, importlib.machinery.SOURCE_SUFFIXES)
    hook = importlib.machinery.FileFinder.path_hook(details)

    def ours_only(path: str) -> Any:
        if not path.startswith(tuple(f"{ROOT}{os.sep}{package}" for package in _PACKAGES)) and path != str(ROOT):
            raise ImportError
        return hook(path)

    sys.path_hooks.insert(0, ours_only)
    sys.path_importer_cache.clear()


class _ReportingLoader(importlib.machinery.SourceFileLoader):
    def path_stats(self, path: str) -> Any:
        raise OSError("no byte code is read or written: it would be that of untraced modules")

    def source_to_code(self, data: Any, path: Any, *, _optimize: int = -1) -> Any:  # type: ignore[override]
        file = Path(path).relative_to(ROOT)
        tree = ast.parse(data, path)
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                name = ast.Constant(f"{file} {node.name}:{node.lineno}")
                call = ast.Expr(ast.Call(ast.Name(_REPORT, ast.Load()), [name], []))
                node.body.insert(1 if ast.get_docstring(node, clean=False) is not None else 0, call)
        return compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True, optimize=_optimize)
