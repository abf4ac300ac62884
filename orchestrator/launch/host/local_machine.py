"""`Machines` of a fleet that runs on this machine."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.config.settings import Config, ConfigError
from orchestrator.launch.commands import frontend_spec, worker_spec
from orchestrator.launch.host.machine import MachineShares
from orchestrator.launch.host.process import LocalProcess
from orchestrator.launch.machines import OnLine, Setup
from orchestrator.types import Role


class LocalMachine:
    """See Machines. `config` says how the machine is shared among the workers."""

    remote = False

    def __init__(self, config: Config) -> None:
        self._shares = MachineShares(config)
        self.device = self._shares.device
        self.room: int | None = self._shares.room

    async def refresh(self) -> None:
        """Does nothing: there is always this machine."""

    async def left_running(self) -> list[str]:
        return []

    async def started_as(self, worker_id: str) -> Role | None:
        """Never: nothing is left running here."""
        return None

    def take(self, owner: str, role: Role) -> None:
        self._shares.take(owner, role)

    def give_back(self, owner: str) -> None:
        self._shares.give_back(owner)

    async def placed(self, owner: str) -> None:
        """Does nothing: a share has its place once it is taken."""

    def worker(self, worker_id: str, role: Role, setup: Setup, on_line: OnLine) -> LocalProcess:
        self._shares.give_back(worker_id)
        try:
            share = self._shares.take(worker_id, role, setup.config)
        except ConfigError as error:
            raise OSError(0, str(error)) from None
        return LocalProcess(worker_spec(setup, role, worker_id, share), on_line)

    def frontend_nodes(self) -> Sequence[str]:
        return ("",)

    def frontend(self, name: str, index: int, node: str, setup: Setup, on_line: OnLine) -> LocalProcess:
        return LocalProcess(frontend_spec(setup, name, index), on_line)
