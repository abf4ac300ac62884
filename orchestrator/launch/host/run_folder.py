"""The folder of one running fleet: its launcher, the URLs of its Redis and its endpoint, its configuration.

There is one per namespace and user; one that another user may have written is refused. The launcher holds a file lock
on it, which the kernel releases when the launcher ends in any way. So a folder whose lock is free was left by a
launcher that was killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import IO, TypeVar

import msgspec

from orchestrator.config.settings import Config, ConfigError, check_name, parse_config
from orchestrator.process.files import Foreign, check_own, make_folder, open_own, own_uid, read_text, write_text
from orchestrator.process.parent import local_pid, own_identity

log = logging.getLogger("pd.launcher")
T = TypeVar("T")

_LOCK = "launcher"
_CONFIG = "config.yaml"
_MODELS = "models.json"
_REDIS = "redis.url"
_READY = "ready.json"
_PROCESSES = "processes.json"
_SHARED_MEMORY = "shared_memory.json"
_WAIT_POLL_S = 0.05
# A process that only asks whether a folder is held takes its lock for a moment.
_CLAIM_PATIENCE_S = 0.5


class FleetRunning(ConfigError):
    """A launcher holds this namespace's folder."""

    def __init__(self, namespace: str, launcher: str | None) -> None:
        pid = local_pid(launcher or "") or "of another container"
        super().__init__(
            f"namespace {namespace!r} is already served by process {pid}; end it with "
            f"`orchestrator down --namespace {namespace}`, or choose another: --set namespace=NAME"
        )


class OtherRelease(ConfigError):
    """What a launcher of another release wrote, and this one cannot read. One line."""


class StartedProcess(msgspec.Struct, frozen=True):
    """A process that the launcher started, as `orchestrator.process.parent` tells processes apart."""

    name: str
    identity: str


class Ready(msgspec.Struct, frozen=True):
    url: str
    model: str
    fleet: str


class RunFolder:
    """Paths and small files. Only the launcher claims and writes; any process of its user may read. Every method raises
    ConfigError for a folder or a file that another user may have written."""

    def __init__(self, namespace: str) -> None:
        """Raises ConfigError, also for a namespace that cannot be a folder's name."""
        self.namespace = check_name("namespace", namespace)
        base = base_folder()
        self.path = base / namespace
        # Beside the folder, not in it: the log outlives the fleet.
        self.log_path = base / f"{namespace}.log"
        self.shared_memory: frozenset[str] = frozenset()  # names of files, as last recorded
        self.operator_key_path = self.path / "operator.key"
        self._lock: IO[str] | None = None
        self._texts: dict[str, str] = {}  # texts by file name, as last written
        self._noted: dict[str, tuple[list[StartedProcess], frozenset[str]]] = {}  # by model
        self._complaint = ""

    # ---- the launcher's side -----------------------------------------------------------------------------------

    def claim(self) -> list[StartedProcess]:
        """Take the folder for this launcher. Returns the processes that a killed launcher had started there;
        `shared_memory` has the names of their segments. Raises FleetRunning, ConfigError."""
        with self._writing():
            deadline = time.monotonic() + _CLAIM_PATIENCE_S
            while (lock := self._try_lock()) is None:
                if time.monotonic() > deadline:
                    raise FleetRunning(self.namespace, self.launcher())
                time.sleep(_WAIT_POLL_S)
            left = self._read_list(_PROCESSES, list[StartedProcess])
            self.shared_memory = frozenset(self._read_list(_SHARED_MEMORY, list[str]))
            for path in self.path.iterdir():
                if path.is_dir():  # counters of its frontends
                    shutil.rmtree(path, ignore_errors=True)
                # The lists of what is left stay until they are written anew: this launcher may be killed, too.
                elif path.name not in (_LOCK, _PROCESSES, _SHARED_MEMORY):
                    path.unlink(missing_ok=True)
            self._hold(lock)
        return left

    def write_config(self, config: Config, generation: int = 0, model: str = "") -> Path:
        """Write the configuration for the fleet's processes, as JSON. JSON is YAML too, and commands read it without a
        YAML parser. `model`: its name where there are several. Returns the file of this generation. Raises ConfigError
        also where it cannot be written: a fleet that serves goes on with the configuration that it has."""
        text = msgspec.json.format(msgspec.json.encode(config), indent=1).decode() + "\n"
        file = f"config-{model}-{generation}.yaml" if model else f"config-{generation}.yaml"
        with self._writing():
            self._write(file, text)
            self._write(_config_file(model), text)
            if model and model not in (models := self.models()):
                self._write(_MODELS, msgspec.json.encode([*models, model]).decode())
            self._write(_REDIS, config.redis.url)
            if config.security.operator_key is not None:
                self._write(self.operator_key_path.name, config.security.operator_key)
        return self.path / file

    def forget_model(self, model: str) -> None:
        """Remove the files of one of several models, which has ended. A fleet runs on without its folder."""
        self._noted.pop(model, None)
        with contextlib.suppress(OSError):
            for path in (self.path / _config_file(model), *self.path.glob(f"config-{model}-*.yaml")):
                generation = path.stem.removeprefix(f"config-{model}-")
                if path.name == _config_file(model) or generation.isdecimal():  # not of a model whose name begins so
                    self._texts.pop(path.name, None)
                    path.unlink(missing_ok=True)
            self._write(_MODELS, msgspec.json.encode([other for other in self.models() if other != model]).decode())

    def note_started(
        self, processes: list[StartedProcess], shared_memory: frozenset[str] = frozenset(), model: str = ""
    ) -> None:
        """Record the started processes of a model. Call it often: it also restores files that a logout or a cleaner of
        temporary files removed. A fleet runs on without its folder, so a failure is only logged, once."""
        self._noted[model] = processes, shared_memory
        started, names = zip(*self._noted.values(), strict=True)
        self.shared_memory = frozenset().union(*names)
        try:
            self._keep_lock()
            self._write(_PROCESSES, msgspec.json.encode([*chain.from_iterable(started)]).decode())
            self._write(_SHARED_MEMORY, msgspec.json.encode(sorted(self.shared_memory)).decode())
            self._complaint = ""
        except (OSError, ConfigError) as error:
            if str(error) != self._complaint:
                self._complaint = str(error)
                log.error("the run folder %s cannot be written: %s", self.path, error)

    def note_ready(self, ready: Ready) -> None:
        """If that fails, `note_started` logs why, and writes it as soon as it can."""
        text = msgspec.json.encode(ready).decode()
        with contextlib.suppress(OSError):
            self._write(_READY, text)
        self._texts[_READY] = text

    def remove(self) -> None:
        """Remove the folder and everything in it, unless another launcher has taken it. Idempotent."""
        if self._lock is None:
            return
        if self._is_current(self._lock) or not (self.path / _LOCK).exists():
            # Before the lock is released, so that no process finds a folder that is partly removed.
            shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()
        self._lock = None

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Raises ConfigError where the folder, which the system's error need not name, cannot be written."""
        try:
            yield
        except Foreign as error:
            raise _refused(error) from None
        except OSError as error:
            mend = "free space there, or set XDG_RUNTIME_DIR"
            raise ConfigError(f"{self.path}: cannot be written ({error.strerror}); {mend}") from None

    def _hold(self, lock: IO[str]) -> None:
        self._lock = lock
        lock.truncate(0)
        # Without a buffer: on a full disk `close` would try again to write it, and fail.
        os.write(lock.fileno(), f"{own_identity()}\n".encode())

    def _keep_lock(self) -> None:
        """Take the lock again if its file was removed. Raises OSError, ConfigError, and FleetRunning if another did."""
        if self._lock is not None and self._is_current(self._lock):
            if not os.fstat(self._lock.fileno()).st_size:  # the disk was full when the file was made
                self._hold(self._lock)
            return
        if (lock := self._try_lock()) is None:
            raise FleetRunning(self.namespace, self.launcher())
        if self._lock is not None:
            self._lock.close()
        self._hold(lock)

    def _is_current(self, lock: IO[str]) -> bool:
        try:
            return os.path.samestat(os.fstat(lock.fileno()), os.stat(self.path / _LOCK))
        except OSError:
            return False

    def _try_lock(self) -> IO[str] | None:
        make_folder(self.path.parent)  # a cleaner of /tmp may have removed it, and another user made one since
        make_folder(self.path)
        lock = open_own(self.path / _LOCK, "a+")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if self._is_current(lock):
                return lock  # else a launcher that was ending has just removed it
        except BlockingIOError:
            pass
        lock.close()
        return None

    def _write(self, name: str, text: str) -> None:
        """Write this file if its text is new, and every file that is missing. Raises OSError."""
        if self._texts.get(name) != text:
            self._texts.pop(name, None)  # where that fails, the next call writes it although it has the same text
            write_text(self.path / name, text)
            self._texts[name] = text
        for other, kept in self._texts.items():
            if not (self.path / other).exists():
                write_text(self.path / other, kept)

    # ---- everybody else's side ---------------------------------------------------------------------------------

    @property
    def is_held(self) -> bool:
        """Whether a launcher is alive."""
        try:
            with open_own(self.path / _LOCK) as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except Foreign as error:
            raise _refused(error) from None
        except OSError:
            return False
        return False

    def launcher(self) -> str | None:
        """The identity (see orchestrator.process.parent) of the process that holds the folder, or held it."""
        return (self._read(_LOCK) or "").strip() or None

    def redis_url(self) -> str | None:
        return self._read(_REDIS)

    def models(self) -> list[str]:
        """The names of the fleet's models; none where it has one that its file does not name."""
        return self._read_list(_MODELS, list[str])

    def config(self, model: str = "") -> Config | None:
        """That of this model; without a name, of the only model, or of the first. Raises OtherRelease."""
        text = self._read(_config_file(model or next(iter(self.models()), "")))
        if not text:
            return None
        try:
            return parse_config(msgspec.json.decode(text))
        except (msgspec.DecodeError, ConfigError) as error:
            raise OtherRelease(f"{self.path}: its configuration was written by another release: {error}") from None

    def ready(self) -> Ready | None:
        """The content of the `Ready` line; None until the fleet is ready."""
        text = self._read(_READY)
        return msgspec.json.decode(text, type=Ready) if text else None

    def wait_until_free(self, timeout_s: float) -> bool:
        """Wait until no launcher holds the folder. Returns False if one still does after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while self.is_held:
            if time.monotonic() > deadline:
                return False
            time.sleep(_WAIT_POLL_S)
        return True

    def _read_list(self, name: str, kind: type[list[T]]) -> list[T]:
        try:
            return msgspec.json.decode(self._read(name) or "[]", type=kind)
        except msgspec.DecodeError:
            return []  # the launcher was killed while it wrote

    def _read(self, name: str) -> str | None:
        try:
            return read_text(self.path / name)
        except Foreign as error:
            raise _refused(error) from None
        except OSError:
            return None


def _config_file(model: str) -> str:
    return f"model-{model}.yaml" if model else _CONFIG


def base_folder() -> Path:
    """Where run folders and logs are. It need not exist. Raises ConfigError for one that is not this user's: another
    may have made it under /tmp, to read our files or to have us read theirs."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    base = Path(f"/tmp/pd-orchestrator-{own_uid()}")  # noqa: S108 - one of another user is refused
    if runtime and os.path.isabs(runtime) and os.access(runtime, os.W_OK):  # the same one wherever a command is run
        base = Path(runtime) / "pd-orchestrator"
    try:
        check_own(base)
    except Foreign as error:
        raise _refused(error) from None
    except OSError:
        pass  # there is none yet, or it says why when it is made
    return base


def _refused(error: Foreign) -> ConfigError:
    return ConfigError(f"{error}, or set XDG_RUNTIME_DIR to a folder of yours")


def held_namespaces() -> list[str]:
    """Namespaces whose launcher is alive. Raises ConfigError."""
    return [name for name in _namespaces() if RunFolder(name).is_held]


def abandoned_namespaces() -> list[str]:
    """Namespaces whose launcher was killed and has left its folder. Raises ConfigError."""
    return [name for name in _namespaces() if not (folder := RunFolder(name)).is_held and folder.launcher()]


def _namespaces() -> list[str]:
    """Those that a launcher has claimed: the folder of a Ray node's processes belongs to none."""
    base = base_folder()
    return sorted(path.parent.name for path in base.glob(f"*/{_LOCK}"))
