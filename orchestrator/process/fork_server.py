"""A process that has imported what others take long to import, and forks them: `python -m THIS FD MODULE...`.

vLLM's modules take 15 s of CPU time to load, and half of a process's memory. Forked processes start at once, and share
that memory. The launcher sends an `Order` over the socket FD, with the descriptor of the new process's output, and gets
a `Reply` as soon as the modules that the new process needs are imported: one that needs few does not wait for those of
another. A new process is the launcher's child, since its parent here ends at once and the launcher adopts orphans. This
process ends with the launcher, whose end of the socket closes then.

As in Python's own fork server (multiprocessing.forkserver), no thread may run when it forks, other than of libraries
that know what a fork is.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import os
import runpy
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

import msgspec

# What a process may have on its own. All else may be read by modules when they are imported, so that processes which
# differ in it are not forked from one.
OWN_VARIABLES = frozenset({"CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "PROMETHEUS_MULTIPROC_DIR", "VLLM_RPC_BASE_PATH"})
OURS = "PD_"  # our own variables are read by the program itself
MAX_MESSAGE_BYTES = 1 << 18
IMPORTS_S = 120.0  # for so long, at most, vLLM is imported: on a busy machine with a slow disk
_ADOPTED_S = 10.0
_POLL_S = 0.001
_TICK_NS = 10_000_000  # of the kernel, by which the times of files are behind
_UNKNOWN = -1  # in place of a time: which text was imported


class Order(msgspec.Struct, frozen=True):
    """Run a module as `python -m` does."""

    number: int  # which its reply has, too
    module: str
    arguments: list[str]
    env: dict[str, str]
    parent: int  # whose child it shall be
    needs: int  # how many of the server's modules are imported first


class Reply(msgspec.Struct, frozen=True):
    """The new process, or, as `changed`, a file that was changed since it was imported: nothing was started."""

    number: int
    pid: int = 0
    changed: str = ""


def main(arguments: list[str]) -> None:
    control = socket.socket(fileno=int(arguments[0]))
    control.set_inheritable(False)
    _show(sys.orig_argv)  # the first call finds its place, beside an environment as the kernel made it
    before = dict(os.environ)
    order = _serve(control, arguments[1:])
    if order is not None:  # in a new process
        by_imports = {name: value for name, value in os.environ.items() if before.get(name) != value}
        _become(order, before, by_imports)
        end_with(lambda: runpy.run_module(order.module, run_name="__main__", alter_sys=True))


def end_with(program: Callable[[], object]) -> NoReturn:
    """Run a program and end this process as Python does, but for taking the interpreter apart: that would copy the
    memory that is shared, for half a second of CPU time."""
    code = None
    try:
        program()
    except SystemExit as end:
        if isinstance(end.code, str):
            raise  # Python shows it
        code = end.code
    threading._shutdown()  # type: ignore[attr-defined]  # what Python calls to wait for threads
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError):  # nobody reads it
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code or 0)


def _serve(control: socket.socket, modules: Sequence[str]) -> Order | None:
    """None once the launcher has ended; in a new process, what that is to run. Orders go before modules that they do
    not need, and before orders that need more."""
    imported, sources = 0, dict[str, int]()
    waiting: list[tuple[Order, int]] = []  # with the descriptors of their outputs
    while True:
        if due := next((each for each in waiting if each[0].needs <= imported), None):
            waiting.remove(due)
            order, output = due
            if changed := next((file for file, mtime_ns in sources.items() if _mtime_ns(file) != mtime_ns), ""):
                reply = Reply(order.number, changed=changed)
            elif pid := _fork_twice(order, output):
                reply = Reply(order.number, pid)
            else:
                control.close()
                for _, of_another in waiting:
                    os.close(of_another)
                return order
            os.close(output)
            control.send(msgspec.msgpack.encode(reply))
        elif imported < len(modules) and not select.select([control], [], [], 0)[0]:
            _import(modules[imported], sources)
            imported += 1
        else:
            message, descriptors, _, _ = socket.recv_fds(control, MAX_MESSAGE_BYTES, 1)
            if not message:
                return None
            waiting.append((msgspec.msgpack.decode(message, type=Order), descriptors[0]))


def _import(module: str, sources: dict[str, int]) -> None:
    """Add the files of all modules that are new, with the times of their last changes."""
    began_ns = time.time_ns() - _TICK_NS
    gc.disable()  # a million objects are made, hardly one of them garbage
    importlib.import_module(module)
    gc.freeze()  # so that no collection touches, and so copies, the memory that is shared
    gc.enable()
    ended_ns = time.time_ns()
    files = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    for file in {file for file in files if file} - sources.keys():
        changed_ns = _mtime_ns(file)
        # One that was changed meanwhile may have been read before.
        sources[file] = _UNKNOWN if began_ns <= changed_ns <= ended_ns else changed_ns


def _mtime_ns(file: str) -> int:
    with contextlib.suppress(OSError):
        return os.stat(file).st_mtime_ns
    return 0


def _fork_twice(order: Order, output: int) -> int:
    """The pid of the new process, a child of `order.parent`; 0 in it. Raises OSError."""
    told, tell = os.pipe()
    first = os.fork()
    if first:
        os.close(tell)
        os.waitpid(first, 0)
        pid = os.read(told, 32)
        os.close(told)
        if not pid:
            raise OSError("no process could be forked, or the launcher has not adopted it")
        return int(pid)
    try:
        first = os.getpid()
        if os.fork():
            os._exit(0)
    except OSError:
        os._exit(1)
    os.close(told)
    os.setsid()
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    os.close(output)
    deadline = time.monotonic() + _ADOPTED_S
    while os.getppid() == first and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    if os.getppid() != order.parent:  # it has ended, or this kernel does not let it adopt
        os._exit(1)
    os.write(tell, str(os.getpid()).encode())
    os.close(tell)
    return 0


def _become(order: Order, before: Mapping[str, str], by_imports: Mapping[str, str]) -> None:
    """Make this process what it would be had it been executed with `order`, and its modules imported since."""
    # A variable that an import has set stays, unless the order has one of its own.
    kept = {name: value for name, value in by_imports.items() if order.env.get(name) == before.get(name)}
    os.environ.clear()
    os.environ.update(order.env | kept)
    sys.argv = [order.module, *order.arguments]
    _show([sys.executable, "-m", *sys.argv])
    if (torch := sys.modules.get("torch")) is not None and (threads := _threads(order.env)):
        torch.set_num_threads(threads)  # the variable was read when torch was loaded
    if (values := sys.modules.get("prometheus_client.values")) is not None:
        # Where values are kept was chosen by PROMETHEUS_MULTIPROC_DIR when it was imported.
        setattr(values, "ValueClass", values.get_value_class())  # noqa: B010 - mypy knows no attributes of a module


def _threads(env: Mapping[str, str]) -> int:
    """What OMP_NUM_THREADS asks for: it may be a list, with a number for each nesting level. 0 for what is ignored."""
    first = env.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(first) if first.isascii() and first.isdecimal() else 0


def _show(command: list[str]) -> None:
    """Have `ps` show this command."""
    from setproctitle import setproctitle  # a dependency of vLLM, which a launcher need not have

    setproctitle(" ".join(command))


if __name__ == "__main__":
    main(sys.argv[1:])
