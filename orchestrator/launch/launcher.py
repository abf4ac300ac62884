"""Runs a fleet on this machine in the foreground: checks first, then Redis, workers and frontends, then `Ready`.

Owns what they share: the run folder, the port, the log, signals, and that nothing is left at the end.
fleet_processes.py has the processes, host/redis_server.py has Redis.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, TypeVar

import msgspec

from orchestrator.config.access import secured
from orchestrator.config.engine_args import check_installed
from orchestrator.config.models import SECTION, fleet_namespace, namespace_of, shared_part
from orchestrator.config.settings import Config, ConfigError, LoggingConfig, Refused, WorkersConfig, value_at
from orchestrator.config.values import masked
from orchestrator.launch.announcement import announce
from orchestrator.launch.commands import to_import
from orchestrator.launch.console import Console, ConsoleHandler, LogFile
from orchestrator.launch.host.fork_servers import ForkServers
from orchestrator.launch.host.leftovers import end_processes, remove_shared_memory
from orchestrator.launch.host.machine import MachineShares, check_bind, hold_port
from orchestrator.launch.host.process import adopt_orphans, whole_environment
from orchestrator.launch.host.redis_server import RedisServer
from orchestrator.launch.host.run_folder import RunFolder, StartedProcess
from orchestrator.launch.pools.builder import ModelBuilder, locate_model
from orchestrator.launch.pools.model_list import COME_BACK_S, ModelFollower, ModelsProcesses, begin_list
from orchestrator.process.parent import ending_signals, has_ended
from orchestrator.process.tasks import cancelled, first_of
from orchestrator.process.telemetry.logs import LogFormat
from orchestrator.store.client import Redis
from orchestrator.store.operator.log_levels import follow_log_level
from orchestrator.store.operator.models import ModelList, ModelStore
from orchestrator.store.planned import of_launchers
from orchestrator.store.registry import Registry
from orchestrator.store.steering import HEARTBEATS

log = logging.getLogger("pd.launcher")
T = TypeVar("T")

# A start waits no longer for a fleet that may live. Workers whose heartbeats are rarer than every 15 s, and no launcher
# of theirs, then find what this one has set: operators who start a fleet that has ended would wait for minutes.
MOST_COME_BACK_S = 30.0
SAID_FROM_S = 1.0  # of a shorter wait nothing is said
# One Ctrl-C can arrive twice: from the terminal, and from the program that started us.
_SAME_SIGNAL_S = 0.5


def launch(models: Mapping[str, Config], tree: Mapping[str, Any], console: Console) -> None:
    """Run until SIGINT, SIGTERM or SIGHUP. Leaves nothing behind but a log. `models`: of this `tree`, and checked.
    Raises ConfigError when the fleet cannot come up, and RedisAway when its Redis does not answer."""
    config = next(iter(models.values()))
    folder = RunFolder(fleet_namespace(models))
    forks = ForkServers()
    with _logging_to(console, config.logging), Signals() as signals:
        try:
            models = _with_operator_key(models, folder)
            with signals.held():  # the folder names what is to be cleaned up, and is removed after a signal
                _clean_up_after_killed(folder, folder.claim(), console)
            if config.launcher.kind == "local":
                for each in models.values():
                    check_installed(each)
                MachineShares(*models.values()).check_room()
                # A port in use is refused now, not after minutes of loading; it is held once the fleet starts.
                hold_port(config.frontend.host, config.frontend.port)[0].close()
                check_bind(config.workers.bind)
                for program, env in chain.from_iterable(map(to_import, models.values())):
                    forks.prepare(program, whole_environment(env))
            console.start_progress()
            _open_log(folder, config.logging.format, console)
            with _connected(config, console, signals):
                found = {name: locate_model(name, each, console) for name, each in models.items()}
                if signals.came:  # the exception was lost in a callback, such as those of imports
                    raise KeyboardInterrupt
                asyncio.run(_run(models, tree, found, folder, console, forks, signals))
        except KeyboardInterrupt:
            console.stop_progress()
            console.say("Stopped before anything was started")
        finally:
            signals.ignore()  # the rest takes a moment, and another one would interrupt it
            console.close()
            forks.close()
            remove_shared_memory(folder.shared_memory)
            folder.remove()


async def _run(
    models: Mapping[str, Config],
    tree: Mapping[str, Any],
    found: Mapping[str, str],
    folder: RunFolder,
    console: Console,
    forks: ForkServers,
    signals: Signals,
) -> None:
    """`found`: where each model is. Raises ConfigError, RedisAway."""
    adopt_orphans()
    signals.end_in_order(console)
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(signals.ignore)
        config = next(iter(models.values()))
        server = RedisServer(config, folder.path)
        stack.push_async_callback(server.stop)
        console.stage("redis", "starting" if server.url == "embedded" else "connecting")
        redis = await signals.or_done(server.start())
        if redis is None:
            return
        stack.push_async_callback(redis.aclose)
        console.stage("redis", masked(server.url), done=True)
        port = config.frontend.port
        if config.launcher.kind == "local":
            held, port = hold_port(config.frontend.host, port)
            stack.callback(held.close)
        listed = await signals.or_done(_list_models(redis, models, tree))
        if signals.came:
            return
        models = _still_listed(models, listed)
        builder = ModelBuilder(models, folder, console, redis, server.url, port, forks)
        fleet = ModelsProcesses({name: builder.build(name, each, found[name]) for name, each in models.items()})
        signals.at_once = fleet.kill
        stack.push_async_callback(fleet.end)
        await signals.or_done(fleet.start())
        if signals.came:
            return
        fleet.watch()
        keeping = asyncio.create_task(server.keep_running(fleet.read_soon), name="redis-keeper")
        levelled = follow_log_level(builder.levels.values(), "launcher", logging.getLogger("pd"))
        levelling = asyncio.create_task(levelled, name="log-level")
        stack.push_async_callback(cancelled, keeping, levelling)
        await signals.or_done(fleet.until_ready())
        if signals.came:
            return
        announce(fleet.models, builder.device, folder, console)
        if listed is None:
            await signals.or_done(asyncio.Event().wait())
            return
        store, make = ModelStore(redis, folder.namespace), partial(builder.build_added, shared=shared_part(tree))
        follower = ModelFollower(store, fleet, make, partial(builder.forget, folder.namespace), listed)
        await signals.or_done(follower.run())


async def _list_models(redis: Redis, models: Mapping[str, Config], tree: Mapping[str, Any]) -> ModelList | None:
    """None for a file of one model. Raises Refused, RedisAway."""
    fleet = fleet_namespace(models)
    store = ModelStore(redis, fleet)
    before = await store.read()
    namespaces = {config.namespace for config in models.values()}
    namespaces |= {namespace_of(fleet, name) for name in before.models} if before is not None else set()
    heartbeat_s = max(config.workers.heartbeat_s for config in models.values())
    await _until_known([Registry(redis, name) for name in namespaces], heartbeat_s)
    if SECTION in tree:
        return await begin_list(redis, fleet, tree)
    listed = await store.read()
    if listed is None or not await store.is_followed(listed, has_ended):
        if await store.delete(listed):  # of a fleet that ran under this name before
            return None
        listed = await store.read()  # a fleet of this name starts now
    if listed is None:
        return None
    names = ", ".join(listed.present)
    raise Refused(f"namespace: under {fleet!r} runs a fleet of several models ({names}); choose another")


async def _until_known(registries: Sequence[Registry], heartbeat_s: float) -> None:
    """Where Redis was away for longer than an entry lives, members of a fleet that runs come back one by one: what that
    has set is not to be replaced by a launcher that takes itself for the only one. `heartbeat_s`: of workers, of which
    some may be all that live, by this launcher's file. Raises RedisAway."""
    for registry in registries:
        heartbeat_s = max(heartbeat_s, await _heartbeat_s(registry))
    come_back_s = known_s = max(COME_BACK_S, min(HEARTBEATS * heartbeat_s, MOST_COME_BACK_S))
    for registry in registries:
        if await registry.has_settings() and not of_launchers(await registry.launchers()):
            registry_s = await registry.known_for_s()  # which notes it where entries have run out just now
            known_s = min(known_s, registry_s if await registry.is_known() else come_back_s)
    if (left_s := come_back_s - known_s) > SAID_FROM_S:
        log.warning("Redis has lost sight of a fleet of this name: it has %.0f s to come back, if it runs", left_s)
    await asyncio.sleep(left_s)


async def _heartbeat_s(registry: Registry) -> float:
    """Of workers that may run: the longest by what they were started with, which may be no file of this host; 0 where
    nothing says so. Raises RedisAway."""
    started, rollout = await registry.configuration.read(), await registry.rollout.read()
    versions = (started, *((rollout.old, rollout.new) if rollout is not None else ()))
    timeouts_s = [value_at(version.config, "workers.timeout_s") for version in versions if version is not None]
    known = (WorkersConfig(timeout_s=it).heartbeat_s for it in timeouts_s if isinstance(it, int | float))
    return max(known, default=0.0)


def _still_listed(models: Mapping[str, Config], listed: ModelList | None) -> Mapping[str, Config]:
    """Without those that were removed from a fleet that runs elsewhere. Raises Refused."""
    if listed is None:
        return models
    there = {name: config for name, config in models.items() if name in listed.present}
    if not there:
        raise Refused(
            f"{SECTION}: the fleet that runs has {', '.join(listed.present)}, and none of this file's; name one of "
            "them in the file, or choose another namespace"
        )
    return there


def _with_operator_key(models: Mapping[str, Config], folder: RunFolder) -> Mapping[str, Config]:
    """One key for all, where there is to be one. On a cluster, frontends of a killed launcher serve on with its key."""
    config = next(iter(models.values()))
    security = config.security
    before = folder.config() if config.launcher.kind != "local" and not folder.is_held else None
    if before is not None and security.operator_key is None:
        security = msgspec.structs.replace(security, operator_key=before.security.operator_key)
    if len(models) > 1:
        security = secured(security, config.frontend.host)
    return {name: msgspec.structs.replace(each, security=security) for name, each in models.items()}


@contextlib.contextmanager
def _connected(config: Config, console: Console, signals: Signals) -> Iterator[None]:
    """To the Ray cluster, where there is one. Raises ConfigError."""
    if config.launcher.kind == "local":
        yield
        return
    from orchestrator.launch.ray.cluster import connect, disconnect

    console.stage("ray", "connecting")
    console.stage("ray", connect(config), done=True)
    signals.listen()  # Ray has set handlers of its own
    try:
        yield
    finally:
        disconnect()


class Signals:
    """What a signal that ends a fleet does: at first it raises KeyboardInterrupt, as Ctrl-C does; while the fleet runs
    the first ends it in order, and the second at once. Under nohup a terminal that is closed ends none."""

    def __init__(self) -> None:
        self.came = False
        self.at_once: Callable[[], None] = lambda: None
        self._act: Callable[[], object] = self._interrupt
        self._ends, self._first_at = asyncio.Event(), 0.0  # monotonic

    def __enter__(self) -> Signals:
        self._before = {number: signal.getsignal(number) for number in ending_signals()}
        self.listen()
        return self

    def listen(self) -> None:
        for number in self._before:
            signal.signal(number, self._hear)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _hear(self, number: int, frame: object) -> None:
        self.came = True
        self._act()

    def _interrupt(self) -> None:
        raise KeyboardInterrupt

    def ignore(self) -> None:
        self._act = lambda: None

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """One that comes meanwhile interrupts afterwards."""
        self.ignore()
        yield
        self._act = self._interrupt
        if self.came:
            raise KeyboardInterrupt

    def end_in_order(self, console: Console) -> None:
        """From now on, the fleet of the loop that runs."""
        self._act = partial(asyncio.get_running_loop().call_soon_threadsafe, self._end, console)

    def _end(self, console: Console) -> None:
        console.stop_progress()
        now = time.monotonic()
        if not self._ends.is_set():
            self._first_at = now
            console.say("Stopping; again to stop at once")
            self._ends.set()
        elif now - self._first_at >= _SAME_SIGNAL_S:
            console.say("Stopping at once")
            self.at_once()

    async def or_done(self, doing: Coroutine[Any, Any, T]) -> T | None:
        """The result of `doing`; None if a signal came first. Raises what it raised."""
        async with first_of(doing, self._ends.wait()) as task:
            return task.result() if task.done() else None


def _open_log(folder: RunFolder, form: LogFormat, console: Console) -> None:
    try:
        console.log_file = LogFile(folder.log_path, form)
    except OSError as error:
        why = error.strerror or error
        raise ConfigError(f"{folder.log_path}: cannot be written ({why}); set XDG_RUNTIME_DIR") from None
    console.stage("log", str(folder.log_path), done=True)


def _clean_up_after_killed(folder: RunFolder, left: list[StartedProcess], console: Console) -> None:
    ended = end_processes(left)
    removed = remove_shared_memory(folder.shared_memory)
    if ended or removed:
        console.say(f"cleaned up after a launcher that was killed: {', '.join(ended + removed)}")


@contextlib.contextmanager
def _logging_to(console: Console, settings: LoggingConfig) -> Iterator[None]:
    handler = ConsoleHandler(console, settings.format)
    logger = logging.getLogger("pd")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(settings.level)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
