"""Makes the processes of each model of a fleet, and removes what a model that has ended leaves. Starts nothing."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from functools import partial
from typing import Any

import msgspec

from orchestrator.config.engine_args import check_engine_args, check_installed
from orchestrator.config.model import find_model
from orchestrator.config.models import model_config, namespace_of
from orchestrator.config.settings import Config, ConfigError
from orchestrator.launch.commands import Setup, resolve
from orchestrator.launch.console import Console
from orchestrator.launch.fleet_processes import FleetProcesses
from orchestrator.launch.host.fork_servers import ForkServers
from orchestrator.launch.host.machine import MachineShares
from orchestrator.launch.host.process import cannot_run
from orchestrator.launch.host.run_folder import RunFolder
from orchestrator.launch.machines import LocalMachine, Machines
from orchestrator.launch.pools.frontend_pool import FrontendPool
from orchestrator.process.tasks import in_thread
from orchestrator.store.client import Redis
from orchestrator.store.operator.log_levels import LogLevels
from orchestrator.store.operator.models import forget_namespace
from orchestrator.store.registry import Registry


def locate_model(name: str, config: Config, console: Console) -> str:
    """Its folder; elsewhere every node looks for it by its name. Raises ConfigError."""
    if config.launcher.kind != "local":
        return config.model
    what = f"model {name}".rstrip()
    console.stage(what, "looking for it")
    model = find_model(config.model, lambda stage: console.stage(what, stage))
    console.stage(what, model, done=True)
    return model


class ModelBuilder:
    """`build` each model that the fleet starts with; `build_added` those that come later."""

    def __init__(
        self,
        models: Mapping[str, Config],
        folder: RunFolder,
        console: Console,
        redis: Redis,
        redis_url: str,
        port: int,
        forks: ForkServers,
    ) -> None:
        """`models`: those that the fleet starts with. `port`: of the frontends."""
        self.configs: dict[str, Config] = {}  # as the file has them
        self.levels: dict[str, LogLevels] = {}
        self._first = next(iter(models.values()))
        self._shares = MachineShares(*models.values()) if self._first.launcher.kind == "local" else None
        self._folder, self._console = folder, console
        self._redis, self._redis_url, self._port = redis, redis_url, port
        self._forks = forks
        self._frontends: FrontendPool | None = None  # of all models
        self.device = ""  # what the engines compute on

    def build(self, name: str, config: Config, found: str) -> FleetProcesses:
        """`found`: where the model is."""
        self.configs[name] = config
        config = resolve(config, found, self._redis_url, self._port)
        machines = self._machines(config)
        self.device = machines.device
        if self._frontends is None:
            self._frontends = FrontendPool(config, machines, self._console.log)
        self.levels[name] = LogLevels(self._redis, config.namespace)
        return FleetProcesses(
            config,
            Registry(self._redis, config.namespace),
            machines,
            self._console,
            partial(self._folder.note_started, model=name),
            self._setup(name, config, 0),
            partial(self._prepare, name, machines),
            self._frontends,
        )

    async def build_added(self, name: str, section: Mapping[str, Any], shared: Mapping[str, Any]) -> FleetProcesses:
        """`section`: the model's part of a file; `shared`: what the file here says of all. Raises ConfigError."""
        self._release(name)  # of an attempt before
        config = model_config(name, section, shared, self.configs, check_engine_args)
        config = msgspec.structs.replace(config, security=self._first.security)
        check_installed(config)
        found = await in_thread(partial(locate_model, name, config, self._console))
        if self._shares is not None:
            self._shares.add(config)
        return self.build(name, config, found)

    async def forget(self, fleet: str, name: str) -> bool:
        """Remove what a model without processes here has left. False while others have some. Raises RedisAway."""
        self._release(name)
        if not await forget_namespace(self._redis, namespace_of(fleet, name)):
            return False
        self._folder.forget_model(name)
        return True

    def _release(self, name: str) -> None:
        if (config := self.configs.pop(name, None)) is not None and self._shares is not None:
            self._shares.remove(config)
        self.levels.pop(name, None)

    def _machines(self, config: Config) -> Machines:
        """Those on this machine share it."""
        if self._shares is not None:
            return LocalMachine(config, self._shares, self._forks)
        from orchestrator.launch.ray.cluster import RayCluster

        return RayCluster(config)

    def _setup(self, name: str, config: Config, generation: int) -> Setup:
        return Setup(generation, config, self._folder.write_config(config, generation, name), name)

    async def _prepare(self, name: str, machines: Machines, changed: Config, generation: int) -> Setup:
        """Raises ConfigError."""
        if changed.python is not None and not machines.remote and shutil.which(changed.python) is None:
            raise ConfigError(f"python: {cannot_run(changed.python)}")  # before any worker is drained for it
        found = await in_thread(partial(locate_model, name, changed, self._console))
        return self._setup(name, resolve(changed, found, self._redis_url, self._port), generation)
