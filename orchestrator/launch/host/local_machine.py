"""This machine as the one that a fleet runs on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from orchestrator.config.settings import Config
from orchestrator.launch.commands import frontend_spec, worker_spec
from orchestrator.launch.host.machine import MachineShares, Share
from orchestrator.launch.host.process import LocalProcess
from orchestrator.launch.machines import OnLine
from orchestrator.types import Role


class LocalMachine:
    """See Machines. `config` is resolved; `config_file` holds it, in the fleet's run folder."""

    remote = False

    def __init__(self, config: Config, config_file: Path) -> None:
        self._config = config
        self._config_file = config_file
        self._shares = MachineShares(config)
        self._taken: dict[str, Share] = {}
        self.device = self._shares.device

    async def look(self) -> None:
        """There is always this one."""

    async def left_running(self) -> list[str]:
        return []

    def take(self, owner: str, role: Role) -> None:
        self._taken[owner] = self._shares.take(owner, role)

    def give_back(self, owner: str) -> None:
        self._taken.pop(owner, None)
        self._shares.give_back(owner)

    async def placed(self, owner: str) -> None:
        assert owner in self._taken, f"{owner} has taken no room"

    def worker(self, worker_id: str, role: Role, on_line: OnLine) -> LocalProcess:
        share = self._taken[worker_id]
        return LocalProcess(worker_spec(self._config, role, worker_id, self._config_file, share), on_line)

    def frontend_nodes(self) -> Sequence[str]:
        return ("",)

    def frontend(self, name: str, index: int, node: str, on_line: OnLine) -> LocalProcess:
        return LocalProcess(frontend_spec(self._config, name, index, self._config_file), on_line)
