"""The least that a fleet's Redis user may do, as docs/several-hosts.md has it."""

import re
from pathlib import Path

from orchestrator.store.client import Redis

_SEVERAL_HOSTS = Path(__file__).parents[1] / "docs" / "several-hosts.md"


def documented_rule(namespace: str, password: str) -> list[str]:
    """The words after ACL SETUSER."""
    found = re.search(r"^ACL SETUSER (.*?)^```", _SEVERAL_HOSTS.read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1].replace("NAMESPACE", namespace).replace("PASSWORD", password).split()


async def add_user(admin: Redis, namespace: str, password: str) -> None:
    """Adds the user `fleet` with that rule."""
    await admin.execute_command("ACL SETUSER", *documented_rule(namespace, password))
