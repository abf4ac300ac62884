"""What the launcher asks of the machines that a fleet runs on, and how this one answers. `ray/` has a cluster's."""

from __future__ import annotations

import abc
import re
from collections.abc import Callable, Mapping, Sequence

from orchestrator.config.engine_args import group_size
from orchestrator.config.settings import Config, ConfigError
from orchestrator.launch.commands import Setup, frontend_spec, worker_spec
from orchestrator.launch.host.fork_servers import ForkServers
from orchestrator.launch.host.machine import MachineShares, Share
from orchestrator.launch.host.process import LocalProcess, ProcessGroup
from orchestrator.types import Role

FRONTEND = "frontend-"  # a frontend's name begins so; workers may not be called so
OnLine = Callable[[str, str], None]  # the name of a process, and a line of its output
_FRONTEND = re.compile(rf"{FRONTEND}(\d+)(?:@(.+))?")
_NEXT = "the next worker"  # who asks this machine for room
_WORKER = re.compile(r"(worker-\d+)(\.\d+)?")  # as `take_ids` of store/lua/registry/members.lua makes them; a rank


def frontend_named(name: str) -> tuple[int, str] | None:
    """The index and the machine, empty text for this one, of the frontend of this name; None for what is none."""
    found = _FRONTEND.fullmatch(name)
    return (int(found[1]), found[2] or "") if found else None


def unit_named(name: str) -> str | None:
    """The unit that a launcher's worker of this name is of; None where none is called so."""
    found = _WORKER.fullmatch(name)
    return found[1] if found else None


def ranks_of(unit: str, size: int) -> list[str]:
    """The ids of a unit's workers. The first has the unit's."""
    return [unit, *(f"{unit}.{rank}" for rank in range(1, size))]


class Machines(abc.ABC):
    """`take` room for a unit, wait until it is `placed`, then make its processes, one after the other; `give_back` when
    the last has ended. Those that are always there, and always have room, need not override what asks for that."""

    device: str  # what the engines compute on, for the line that says that the fleet is ready
    remote: bool  # other machines, where processes run on when the launcher is killed, for the next one to take over
    room: int | None = None  # the most units that they hold; None where more machines may come

    def use(self, config: Config) -> None:  # noqa: B027 - see above
        """What starts from now on is of this configuration."""

    async def refresh(self) -> None:  # noqa: B027
        """Read anew which machines there are. May take as long as they do not answer."""

    async def left_running(self) -> Mapping[str, bool]:
        """Frontends and units of which an earlier launcher left anything, and whether a process. Raises ConfigError."""
        return {}

    async def take_over(self, units: Mapping[str, Role | None]) -> Mapping[str, Role]:
        """Let the next processes of these units be those that run, as they are. Returns the roles in which they were
        started, of those of which all run; with others nothing is done. `units` has their roles in the registry, which
        count where they are there, and do not answer. Raises ConfigError."""
        return {}

    def fitting(self, roles: Sequence[Role]) -> list[Role]:
        """Of units of these roles, those that there is room for. Raises ConfigError where there is for none."""
        return list(roles)

    def take(self, unit: str, role: Role) -> None:  # noqa: B027
        """Reserve room. Raises ConfigError when there is none and none will come."""

    @abc.abstractmethod
    async def give_back(self, unit: str) -> None:
        """What it has, and what still runs there. Idempotent. Returns in bounded time."""

    async def placed(self, unit: str, wanted: Callable[[], tuple[Role, Setup]]) -> None:  # noqa: B027
        """Returns when there is what it needs in this role with this setup; room of another size is given back."""

    @abc.abstractmethod
    def worker(self, unit: str, role: Role, setup: Setup, on_line: OnLine) -> ProcessGroup:
        """Not started yet, with the room that it has taken. Raises OSError, also where this setup needs other room."""

    @abc.abstractmethod
    def frontend_nodes(self) -> Sequence[str] | None:
        """Addresses of machines that should have frontends, empty text for this one; None until they are known."""

    @abc.abstractmethod
    def frontend(self, name: str, index: int, node: str, setup: Setup, on_line: OnLine) -> ProcessGroup:
        """A process that is not started yet. Raises OSError."""


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
