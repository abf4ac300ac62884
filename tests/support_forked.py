"""Launchers and commands that are forked by a process which has imported their modules, and vLLM, once for a test run,
instead of executed.

A launcher's fork servers (`orchestrator.launch.host.fork_servers`) take 9 s of CPU time for these imports, most of what
a fleet of simulated engines takes to start. Here they are forked beside their launcher, where the environment is that
in which vLLM was imported; all else is as the product has it. The fleet of `e2e/test_package.py` is executed, and so
are the commands of `orchestrator/cli/test_main.py`.
"""

import atexit
import contextlib
import errno
import functools
import gc
import importlib
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import msgspec
from support_wait import DEADLINE_S

from orchestrator.config.settings import Config
from orchestrator.launch.commands import to_import
from orchestrator.launch.host import fork_servers
from orchestrator.launch.host.process import whole_environment
from orchestrator.process import fork_server
from orchestrator.process.parent import kill_with

_CHECKOUT = Path(__file__).parents[1]
_TESTS = str(_CHECKOUT / "tests")
_PROGRAM = f"import sys; sys.path.append({_TESTS!r}); import support_forked as s; s.main(*sys.argv[1:])"
_MAX_BYTES = 1 << 18
_SERVERS = 2  # of a launcher whose engines are simulated: one forks workers, the other frontends
# Not when vLLM is imported, but by the server that is made then, by a launcher, or by a client.
_READ_LATER = {"OTEL_TRACES_SAMPLER_ARG", "SSL_CERT_FILE", "TERM", "XDG_RUNTIME_DIR"}
_READ_LATER |= {"VLLM_ALLOW_RUNTIME_LORA_UPDATING", "VLLM_SERVER_DEV_MODE"}
# What vLLM sets where it makes a configuration, as tests have it do in this process. A launcher's user has none of it.
_BY_VLLM = {"LD_PRELOAD", "LOCAL_WORLD_SIZE", "NUMEXPR_MAX_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"}
_BY_VLLM |= {"TORCHINDUCTOR_CPP_DYNAMIC_THREADS", "VLLM_ALLOW_LONG_MAX_MODEL_LEN", "VLLM_DISABLE_SHARED_EXPERTS_STREAM"}
_BY_VLLM |= {"VLLM_MAX_N_SEQUENCES", "VLLM_SSM_CONV_STATE_LAYOUT", "VLLM_WORKER_MULTIPROC_METHOD"}


class _Start(msgspec.Struct):
    """A command line from its module on; where; with which environment. `constants`: of modules, by their whole names,
    for all of its processes. `nohup`: SIGHUP is ignored. `names`: the variable that names the inherited descriptor."""

    arguments: list[str]
    folder: str
    env: dict[str, str]
    constants: Mapping[str, float] = {}
    nohup: bool = False
    names: str = ""


def _users(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name not in _BY_VLLM}


def _imported_with(env: dict[str, str]) -> frozenset[tuple[str, str]]:
    """What decides, of an environment, whether modules imported in it serve another."""
    later = {name for name in env if name.startswith("PYTEST")} | _READ_LATER
    return fork_servers._import_environment({name: value for name, value in env.items() if name not in later})


# ---- the test's side ---------------------------------------------------------------------------------------------


class ForkedLauncher:
    """As subprocess.Popen, of which it has what tests use."""

    _server: socket.socket | None = None
    _process: subprocess.Popen[bytes] | None = None

    def __init__(
        self,
        arguments: Sequence[str],
        folder: Path,
        output: int,
        errors: int = -1,
        constants: Mapping[str, float] = MappingProxyType({}),
        inherits: tuple[str, int] | None = None,
    ) -> None:
        """`arguments`: of `orchestrator`. `output`, `errors`: where it writes to; by default to one place. `constants`:
        see `_Start`. `inherits`: a variable of its environment, and the descriptor that this is to name there."""
        self.returncode: int | None = None
        self._told, tell = os.pipe()
        nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        names, *inherited = inherits or ("",)
        start = _Start(list(arguments), str(folder), _users(os.environ), dict(constants), nohup, names)
        descriptors = [output, output if errors < 0 else errors, tell, *inherited]
        socket.send_fds(self._serving(), [msgspec.msgpack.encode(start)], descriptors)
        os.close(tell)
        self.pid = int(self._line())  # ValueError: no process could be forked

    @classmethod
    def _serving(cls) -> socket.socket:
        """One process forks for all pytest processes of a run: who binds its name starts it. It ends with the last."""
        if cls._server is None:
            address = "\0pd-forks-" + os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
                try:
                    listener.bind(address)
                except OSError as error:
                    if error.errno != errno.EADDRINUSE:
                        raise
                else:
                    listener.listen()
                    cls._process = _execute(listener)
            cls._server = _connected(address)
            atexit.register(cls._server.close)
        return cls._server

    def _line(self) -> bytes:
        """Empty when whoever would tell was killed."""
        line = b""
        while not line.endswith(b"\n") and (more := os.read(self._told, 1)):
            line += more
        return line

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._told], [], [], 0)[0]:
            self.returncode = int(self._line() or 255)
            os.close(self._told)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None and not select.select([self._told], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired("orchestrator", timeout or 0.0)
        code = self.poll()
        assert code is not None
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run_forked(arguments: Sequence[str], folder: Path, timeout_s: float) -> subprocess.CompletedProcess[str]:
    """As subprocess.run of a command whose output is captured. Raises subprocess.TimeoutExpired."""
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        command = ForkedLauncher(arguments, folder, output.fileno(), errors.fileno())
        try:
            code = command.wait(timeout_s)
        finally:
            command.kill()
        output.seek(0)
        errors.seek(0)
        return subprocess.CompletedProcess(arguments, code, output.read().decode(), errors.read().decode())


def _execute(listener: socket.socket) -> subprocess.Popen[bytes]:
    programs = [each for engine in ("vllm", "sim") for each in to_import(Config(model="", engine=engine))]
    imports, (_, env) = dict.fromkeys(name for program, _ in programs for name in program.imports), programs[0]
    return subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, str(listener.fileno()), *imports],
        cwd=_CHECKOUT,
        env=_users(whole_environment(env)),
        stdin=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=[listener.fileno()],
        start_new_session=True,
    )


def _connected(address: str) -> socket.socket:
    connection, deadline = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET), time.monotonic() + DEADLINE_S
    while True:
        try:
            connection.connect(address)
            return connection
        except ConnectionRefusedError:  # it is bound, and does not listen yet
            assert time.monotonic() < deadline, "the process that forks launchers takes no connection"
            time.sleep(0.01)


# ---- the process that forks them ---------------------------------------------------------------------------------


def main(descriptor: str, *imports: str) -> None:
    fork_server._show(sys.orig_argv)  # the first call finds its place, beside an environment as the kernel made it
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whatever the first launcher is to have
    imported_with = _imported_with(dict(os.environ))
    gc.disable()
    for module in (*imports, "orchestrator.launch.launcher"):
        importlib.import_module(module)
    for module, _ in importlib.import_module("orchestrator.cli.main").COMMANDS.values():
        importlib.import_module(f"orchestrator.cli.{module}")
    gc.freeze()  # as in the product's fork server: no collection touches the memory that is shared
    gc.enable()
    listener, runs = socket.socket(fileno=int(descriptor)), list[socket.socket]()
    while True:
        (first, *_), _, _ = select.select([listener, *runs], [], [])
        if first is listener:
            runs.append(listener.accept()[0])
            continue
        message, descriptors, _, _ = socket.recv_fds(first, _MAX_BYTES, 4)
        if not message:
            runs.remove(first)
            first.close()
            if not runs:
                return  # the tests have ended
            continue
        if os.fork() == 0:
            for each in (listener, *runs):
                each.close()
            start, (output, errors, tell, *inherited) = msgspec.msgpack.decode(message, type=_Start), descriptors
            if inherited:
                start.env[start.names] = str(inherited[0])
            if (run := _watched(start, output, errors, tell, imported_with)) is not None:
                fork_server.end_with(run)
            return
        for given in descriptors:
            os.close(given)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _watched(
    start: _Start, output: int, errors: int, tell: int, imported_with: frozenset[tuple[str, str]]
) -> Callable[[], None] | None:
    """None here, once the launcher has ended; in it, and in its fork server, what these run."""
    if pid := os.fork():
        os.write(tell, b"%d\n" % pid)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        os.write(tell, b"%d\n" % code)
        os._exit(0)
    os.close(tell)
    os.setsid()
    os.dup2(output, 1)
    os.dup2(errors, 2)
    os.close(output)
    os.close(errors)
    os.chdir(start.folder)
    os.environ.clear()
    os.environ.update(start.env)
    for name, value in start.constants.items():
        module, _, constant = name.rpartition(".")
        setattr(importlib.import_module(module), constant, value)
    if start.arguments[0] != "up":
        return lambda: _command(start.arguments)
    if start.nohup:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    launcher, unused = os.getpid(), dict[int, socket.socket]()
    for _ in range(_SERVERS):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if (forked := os.fork()) == 0:
            for each in (ours, *unused.values()):
                each.close()
            kill_with(launcher)
            return functools.partial(_serve_launcher, theirs)
        theirs.close()
        ours.set_inheritable(False)
        unused[forked] = ours

    def popen(command: list[str], env: dict[str, str], pass_fds: list[int], **how: Any) -> Any:
        if not unused or command[0] != sys.executable or _imported_with(env) != imported_with:
            return subprocess.Popen(command, env=env, pass_fds=pass_fds, **how)
        forked, control = unused.popitem()
        with control:
            socket.send_fds(control, [msgspec.msgpack.encode(_Start(command, "", env))], pass_fds)
        return SimpleNamespace(kill=lambda: _kill(forked), wait=lambda timeout: _reap(forked))

    def run() -> None:
        try:
            _command(start.arguments)
        finally:
            for forked in unused:
                _kill(forked)
                _reap(forked)

    fork_servers.subprocess = SimpleNamespace(**vars(subprocess) | {"Popen": popen})  # type: ignore[assignment]
    return run


def _command(arguments: list[str]) -> None:
    from orchestrator.cli.main import main

    sys.argv = ["orchestrator", *arguments]
    fork_server._show([sys.executable, "-m", "orchestrator.cli.main", *arguments])
    main()


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended by itself
        os.kill(pid, signal.SIGKILL)


def _reap(pid: int) -> None:
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)


def _serve_launcher(control: socket.socket) -> None:
    message, descriptors, _, _ = socket.recv_fds(control, _MAX_BYTES, 1)
    if not message:
        return  # the launcher needs none
    control.close()
    start = msgspec.msgpack.decode(message, type=_Start)
    os.setsid()
    os.environ.clear()
    os.environ.update(start.env)
    sys.orig_argv = start.arguments
    place = start.arguments.index(fork_servers._SERVER)
    fork_server.main([str(descriptors[0]), *start.arguments[place + 2 :]])
