"""What most commands share: their options, how to find the fleet, and how to print an answer.

The Redis client is imported only where it is opened: its import takes longer than most commands.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import math
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

import msgspec
import typer
from rich.console import Console, RenderableType

from orchestrator.config.access import REDIS_URL
from orchestrator.config.models import namespace_of
from orchestrator.config.settings import Config, Refused, WorkersConfig
from orchestrator.launch.host.run_folder import RunFolder, held_namespaces

if TYPE_CHECKING:
    from orchestrator.store.client import Redis
    from orchestrator.store.queue import PrefillQueue
    from orchestrator.store.registry import Registry


def option(name: str, help: str, **limits: Any) -> Any:
    return typer.Option(name, help=help, **limits)


_HERE = "default: the fleet on this machine."
NamespaceOption = Annotated[
    str | None,
    typer.Option(
        "--namespace", "--model", help=f"The fleet's namespace, or one of its models, if it has several; {_HERE}"
    ),
]
ModelOption = Annotated[str | None, option("--model", "Which model of the file, if it has several.")]
WholeFleetOption = Annotated[str | None, option("--namespace", f"The fleet's namespace; {_HERE}")]
RedisOption = Annotated[
    str | None,
    option("--redis", "URL of the fleet's Redis; default: that of the fleet on this machine.", envvar=REDIS_URL),
]
UrlOption = Annotated[str | None, option("--url", "URL of a frontend to ask, instead of Redis.")]
JsonOption = Annotated[bool, option("--json", "Print JSON instead of text.")]
SetOption = Annotated[list[str] | None, option("--set", "Override a configuration key: a.b=value. Repeatable.")]
ForceOption = Annotated[bool, option("--force", "Allow it although requests would be refused.")]
MaxUnavailableOption = Annotated[int, option("--max-unavailable", "How many workers may be down at a time.", min=1)]
WorkerArgument = Annotated[str, typer.Argument(help="A worker's id, as `orchestrator status` shows it.")]


def console(width: int = 200, stderr: bool = False) -> Console:
    """Without markup: clients choose request ids, and IPv6 addresses have brackets. `width`: without a terminal."""
    stream = sys.stderr if stderr else sys.stdout
    return Console(width=None if stream.isatty() else width, stderr=stderr, markup=False, emoji=False)


OUT = console()
_REDIS_TIMEOUT_S = 2.0
# Commands that follow the fleet for minutes keep asking while Redis fails over or is slow.
_REDIS_PATIENCE_S, _ASK_AGAIN_S = 60.0, 0.5
T = TypeVar("T")


class FleetHandle(msgspec.Struct, frozen=True):
    """Where a fleet is, by the command's options or by the launcher that runs on this machine."""

    namespace: str
    redis_url: str | None  # None where only a frontend was named
    url: str | None  # of its endpoint; None unless an option names it, or a launcher on this machine runs it
    config: Config | None
    model: str = ""  # its name, where the fleet's file names its models

    @property
    def workers(self) -> WorkersConfig:
        """The defaults where the fleet's are not known."""
        return self.config.workers if self.config is not None else WorkersConfig()


class OpenFleet(msgspec.Struct, frozen=True):
    """An open connection to a fleet's Redis. Methods of its parts raise RedisAway."""

    namespace: str
    redis: Redis
    registry: Registry
    queue: PrefillQueue
    heartbeat_s: float  # of its workers


class Named(NamedTuple):
    """A fleet, as a command's options name it."""

    namespace: str | None = None
    redis: str | None = None
    url: str | None = None

    @property
    def by_address(self) -> bool:
        return (self.redis, self.url) != (None, None)

    def find(self) -> FleetHandle:
        return find_fleet(*self)

    def ask(self, what: Callable[[OpenFleet], Awaitable[T]]) -> T:
        return ask(self.find(), what)


Said = tuple[Any, RenderableType]  # what `say` prints: as JSON, or for people


def fleet_command(
    register: Callable[[Callable[..., None]], object], by_url: bool = False, whole: bool = False
) -> Callable[[Callable[..., Said | None]], Callable[..., Said | None]]:
    """A command about a fleet, or `whole`: about one with all its models. It is called with the fleet that --namespace,
    --redis and, `by_url`, --url name, and with its own options. What it returns is printed; one that prints by itself
    takes `as_json`. `register`: typer's decorator."""
    named = {"namespace": WholeFleetOption if whole else NamespaceOption, "redis": RedisOption}
    named |= {"url": UrlOption} if by_url else {}
    added = functools.partial(inspect.Parameter, kind=inspect.Parameter.KEYWORD_ONLY)
    last = [added(name, default=None, annotation=kind) for name, kind in named.items()]
    last.append(added("as_json", default=False, annotation=JsonOption))

    def decorate(command: Callable[..., Said | None]) -> Callable[..., Said | None]:
        _, *own = inspect.signature(command, eval_str=True).parameters.values()
        prints = any(parameter.name == "as_json" for parameter in own)

        @functools.wraps(command)
        def run(as_json: bool, **given: Any) -> None:
            fleet = Named(**{name: given.pop(name) for name in named})
            said = command(fleet, **given, **({"as_json": as_json} if prints else {}))
            if said is not None:
                say(*said, as_json)

        own = [parameter for parameter in own if parameter.name != "as_json"]
        run.__signature__ = inspect.Signature([*own, *last])  # type: ignore[attr-defined]  # by which typer parses
        register(run)
        return command

    return decorate


def find_fleet(namespace: str | None, redis_url: str | None, url: str | None = None) -> FleetHandle:
    """The fleet that the options name, or the one that runs here. Raises Refused where there is none."""
    if url is not None:
        if not _is_address(url):
            raise Refused(f"--url: expected http://HOST:PORT or https://HOST:PORT, got {url!r}")
        return FleetHandle(namespace or "default", redis_url, url.rstrip("/"), None)
    fleet, model = _located(namespace)
    folder = RunFolder(fleet)
    namespace = namespace_of(fleet, model) if model else fleet
    redis = _redis_of(folder, namespace, redis_url)
    if not folder.is_held or redis != folder.redis_url():
        return FleetHandle(namespace, redis, None, None)  # a fleet elsewhere may have the same name
    ready = folder.ready()
    url = (f"{ready.url}/models/{model}" if model else ready.url) if ready else None
    return FleetHandle(namespace, redis, url, folder.config(model), model)


def config_here(namespace: str | None) -> Config | None:
    """That of the fleet on this machine, or of its model; None where none runs. Raises Refused where several do."""
    fleet, model = _located(namespace)
    return RunFolder(fleet).config(model) if RunFolder(fleet).is_held else None


def find_whole_fleet(named: Named) -> FleetHandle:
    """All models of the fleet that the options name, or that runs here. Raises Refused where there is none."""
    fleet = namespace_here(named.namespace)
    folder = RunFolder(fleet)
    redis = _redis_of(folder, fleet, named.redis)
    return FleetHandle(fleet, redis, None, folder.config() if folder.is_held else None)


def _redis_of(folder: RunFolder, namespace: str, given: str | None) -> str:
    """The URL of a fleet's Redis. Raises Refused."""
    if redis := given or (folder.redis_url() if folder.is_held else None):
        return redis
    raise Refused(
        f"no fleet runs in namespace {namespace!r}; start one with `orchestrator up CONFIG`, or name its --redis"
    )


def models_here(namespace: str | None) -> dict[str, str]:
    """Its models and their namespaces, where its file names them; none where `namespace` is that of one of them."""
    held = held_namespaces() if namespace is None else [namespace]
    models = RunFolder(held[0]).models() if len(held) == 1 and RunFolder(held[0]).is_held else []
    return {model: namespace_of(held[0], model) for model in models}


def _located(given: str | None) -> tuple[str, str]:
    """The namespace of a fleet, and which of its models, empty text where it has one. Raises Refused."""
    if given is not None and not RunFolder(given).is_held:
        ours = [(fleet, model) for fleet in held_namespaces() for model in RunFolder(fleet).models()]
        named = [(fleet, model) for fleet, model in ours if given in (model, namespace_of(fleet, model))]
        if len(named) > 1:
            full = ", ".join(namespace_of(fleet, model) for fleet, model in named)
            raise Refused(f"several fleets here have a model {given!r}: name one of {full} with --namespace")
        return named[0] if named else (given, "")
    fleet = namespace_here(given)
    models = RunFolder(fleet).models()
    if len(models) > 1:
        raise Refused(f"fleet {fleet!r} has several models ({', '.join(models)}); name one with --model")
    return fleet, models[0] if models else ""


def namespace_here(given: str | None) -> str:
    """The given namespace, else that of the fleet on this machine. Raises Refused where several run."""
    held = [given] if given is not None else held_namespaces()
    if len(held) > 1:
        raise Refused(f"several fleets run here ({', '.join(held)}); name one with --namespace")
    return held[0] if held else "default"


def fleet_at(port: int | None) -> Config | None:
    """The configuration of the fleet on this machine whose frontends listen at this port."""
    for folder in map(RunFolder, held_namespaces()):
        ready = folder.ready()
        if ready is not None and urlsplit(ready.url).port == port:
            return folder.config()
    return None


def _is_address(url: str) -> bool:
    with contextlib.suppress(ValueError):
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    return False


@contextlib.asynccontextmanager
async def open_fleet(handle: FleetHandle) -> AsyncIterator[OpenFleet]:
    """Raises Refused when its Redis cannot be used."""
    from orchestrator.store.client import RedisAway, connect
    from orchestrator.store.queue import PrefillQueue
    from orchestrator.store.registry import Registry

    if handle.redis_url is None:
        raise Refused("this needs the fleet's Redis; name it with --redis")
    try:
        async with await connect(handle.redis_url, _REDIS_TIMEOUT_S) as redis:
            registry, queue = Registry(redis, handle.namespace), PrefillQueue(redis, handle.namespace)
            yield OpenFleet(handle.namespace, redis, registry, queue, handle.workers.heartbeat_s)
    except RedisAway as error:
        raise Refused(str(error)) from error


def ask(handle: FleetHandle, what: Callable[[OpenFleet], Awaitable[T]]) -> T:
    """Run `what` on the open fleet, and return its result. Raises Refused."""

    async def connected() -> T:
        async with open_fleet(handle) as fleet:
            return await what(fleet)

    return asyncio.run(connected())


async def retry_while_away(what: Callable[[], Awaitable[T]], was_away: Callable[[], None] = lambda: None) -> T:
    """The result of `what`, tried again while Redis is away. Raises RedisAway when it stays away for a minute.
    `was_away` is told of each try that failed: what is waited for could not be seen meanwhile, nor happen."""
    from orchestrator.store.client import RedisAway

    deadline = time.monotonic() + _REDIS_PATIENCE_S
    while True:
        try:
            return await what()
        except RedisAway:
            if time.monotonic() > deadline:
                raise
        await asyncio.sleep(_ASK_AGAIN_S)
        was_away()


def check_writable(*files: Path | None) -> None:
    """Check output files before work whose result would be lost. Raises Refused."""
    for file in files:
        if file is not None and (file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK)):
            raise Refused(f"{file}: cannot be written; name a file in an existing folder")


def positive_numbers(text: str) -> list[float]:
    """Those of `2,4,8`; none for any other text, nor where one is infinite: a run at that rate would never end."""
    with contextlib.suppress(ValueError):
        numbers = [float(part) for part in text.split(",")]
        return numbers if all(0 < number < math.inf for number in numbers) else []
    return []


def say(value: Any, shown: RenderableType, as_json: bool) -> None:
    """Print what a command has found or done: as JSON, or as people read it; a line of text is not wrapped."""
    if as_json:
        print_json(value)
    else:
        OUT.print(shown, highlight=False, soft_wrap=isinstance(shown, str))


def print_json(value: Any) -> None:
    sys.stdout.write(msgspec.json.encode(value).decode() + "\n")
    sys.stdout.flush()
