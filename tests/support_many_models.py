"""A fleet of several models as tests ask it: each by its name, and by its pages."""

import json
import subprocess

from support_client import FleetClient
from support_fleet import RunningFleet

from orchestrator.launch.host.run_folder import RunFolder


class Models(RunningFleet):
    """Roles stay, unless `sets` say otherwise."""

    def __init__(self, config: str, *sets: str, start_timeout_s: float = 400) -> None:
        """Raises FleetFailed."""
        super().__init__(config, "ratio.mode=off", *sets, start_timeout_s=start_timeout_s)

    def of(self, model: str, url: str = "") -> FleetClient:
        """Asks at the common address, by the name in the body. `url`: of a frontend of its own."""
        client = FleetClient(url or self.url, self.namespace)
        client.model = model
        return client

    def at(self, model: str) -> FleetClient:
        """Looks at the model's own pages, by its path."""
        return FleetClient(f"{self.url}/models/{model}", self.namespace)

    def steer(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """A command that may start each frontend again."""
        done = self.run(*arguments, timeout_s=500)
        assert done.returncode == 0, done.stdout + done.stderr
        return done

    def steer_one(self, model: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.steer(*arguments, "--model", f"{self.namespace}.{model}")

    def rests(self, model: str) -> bool:
        """Whether it is idle, and none of its workers runs."""
        seen = self.http.get(f"/models/{model}/fleet").json()
        return seen["desired"]["set_by"] == "idle" and not seen["workers"] and not self._noted_workers(model)

    def _noted_workers(self, model: str) -> list[str]:
        noted = json.loads((RunFolder(self.namespace).path / "processes.json").read_text())
        return [process["name"] for process in noted if process["name"].startswith(f"{model}-worker-")]

    def shared_memory(self) -> set[str]:
        """Names of the segments of its processes."""
        return set(json.loads((RunFolder(self.namespace).path / "shared_memory.json").read_text()))
