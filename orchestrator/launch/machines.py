"""What the launcher asks of the machines that a fleet runs on: this one, or a Ray cluster's."""

from __future__ import annotations

import abc
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from orchestrator.config.settings import Config
from orchestrator.launch.host.process import ProcessGroup
from orchestrator.types import Role

FRONTEND = "frontend-"  # a frontend's name begins so; workers may not be called so
OnLine = Callable[[str, str], None]  # the name of a process, and a line of its output
_FRONTEND = re.compile(rf"{FRONTEND}(\d+)(?:@(.+))?")
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


class Setup(msgspec.Struct, frozen=True):
    """What a process is started with."""

    generation: int
    config: Config  # resolved
    config_file: Path  # that holds it here
    model: str = ""  # its name where the fleet has several
    others: tuple[Setup, ...] = ()  # what else a frontend is started with then

    @property
    def worker_name(self) -> str:
        """What the ids of workers begin with: several models share a machine, and its log."""
        return f"{self.model}-worker" if self.model else "worker"


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
