"""`Machines` of a fleet that runs on this machine."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.config.engine_args import group_size
from orchestrator.config.settings import Config, ConfigError
from orchestrator.launch.commands import frontend_spec, worker_spec
from orchestrator.launch.host.fork_servers import ForkServers
from orchestrator.launch.host.machine import MachineShares, Share
from orchestrator.launch.host.process import LocalProcess, ProcessGroup
from orchestrator.launch.machines import Machines, OnLine, Setup, ranks_of
from orchestrator.types import Role

_NEXT = "the next worker"  # who asks the machine for room


class LocalMachine(Machines):
    """`config`: what a worker needs, until another is used. `shares`, `forks`: for all models of this machine."""

    remote = False

    def __init__(self, config: Config, shares: MachineShares | None = None, forks: ForkServers | None = None) -> None:
        self._forks = forks
        self._shares = shares or MachineShares(config)
        self._ranks: dict[str, list[str]] = {}  # by unit, whose shares of the machine it has
        self.device = self._shares.device
        self.use(config)

    def use(self, config: Config) -> None:
        self._config = config
        self.room = self._shares.room_for(config)

    def fitting(self, roles: Sequence[Role]) -> list[Role]:
        units: list[str] = []
        try:
            for number, role in enumerate(roles):
                self.take(unit := f"{_NEXT} but {number}" if number else _NEXT, role)
                units.append(unit)
        except ConfigError:
            if not units:
                raise
        finally:
            for unit in units:
                self._give_back(unit)
        return list(roles[: len(units)])

    def take(self, unit: str, role: Role) -> None:
        self._take(unit, role, self._config)

    def _take(self, unit: str, role: Role, config: Config) -> list[Share]:
        """A share for each rank. Raises ConfigError."""
        self._ranks[unit] = ranks = ranks_of(unit, group_size(config, role))
        try:
            return [self._shares.take(rank, role, config) for rank in ranks]
        except ConfigError:
            self._give_back(unit)
            raise

    async def give_back(self, unit: str) -> None:
        self._give_back(unit)

    def _give_back(self, unit: str) -> None:
        for rank in self._ranks.pop(unit, ()):
            self._shares.give_back(rank)

    def worker(self, unit: str, role: Role, setup: Setup, on_line: OnLine) -> ProcessGroup:
        self._give_back(unit)
        try:
            shares = self._take(unit, role, setup.config)
        except ConfigError as error:
            raise OSError(0, str(error)) from None
        ranks = self._ranks[unit]
        group = ranks if len(ranks) > 1 else ()
        specs = [worker_spec(setup, role, rank, share, group) for rank, share in zip(ranks, shares, strict=True)]
        return ProcessGroup([LocalProcess(spec, on_line, self._forks) for spec in specs])

    def frontend_nodes(self) -> Sequence[str]:
        return ("",)

    def frontend(self, name: str, index: int, node: str, setup: Setup, on_line: OnLine) -> ProcessGroup:
        return ProcessGroup([LocalProcess(frontend_spec(setup, name, index), on_line, self._forks)])
