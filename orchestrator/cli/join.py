"""`orchestrator join` and `orchestrator worker`: a worker on another host, with the fleet's configuration.

The launcher keeps the fleet's configuration in Redis. A token holds the URL of that Redis. The URL may contain a
password, so the token is a secret.
"""

from __future__ import annotations

import base64
import os
import sys
from typing import Annotated, Any
from urllib.parse import urlsplit

import msgspec
import typer

from orchestrator.cli.handle import FleetHandle, Named, Said, ask, fleet_command, option
from orchestrator.config.settings import ConfigError, Refused, parse_config
from orchestrator.process.parent import EXIT_AGAIN, report_exit
from orchestrator.types import Role

_LOCAL = ("127.", "::1", "localhost")
_ALL = ("0.0.0.0", "::")  # noqa: S104 - compared with, not bound
app = typer.Typer()


class Token(msgspec.Struct, frozen=True, array_like=True):
    redis_url: str
    namespace: str

    def encode(self) -> str:
        return base64.urlsafe_b64encode(msgspec.json.encode(self)).decode().rstrip("=")

    @classmethod
    def decode(cls, text: str) -> Token:
        """Raises Refused."""
        try:
            return msgspec.json.decode(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)), type=cls)
        except ValueError:
            raise Refused("--join: expected what `orchestrator join` prints; it is cut off or damaged") from None


@fleet_command(app.command())
def join(fleet: Named) -> Said:
    """Print what another host needs to run a worker of this fleet. It is a secret: it holds the URL of Redis."""
    handle = fleet.find()
    url = handle.redis_url or ""
    host = urlsplit(url).hostname or ""
    if not host or host.startswith(_LOCAL):
        print(
            f"only this host reaches the fleet's Redis ({url if not host else host}): for others set redis.url to a "
            "server that they reach",
            file=sys.stderr,
        )
    token, command = Token(url, handle.namespace).encode(), "orchestrator worker --role decode"
    return {"PD_JOIN": token, "command": command}, f"PD_JOIN={token} {command}"


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def worker(
    context: typer.Context,
    token: Annotated[str, option("--join", "What `orchestrator join` prints.", envvar="PD_JOIN")],
    role: Annotated[Role, option("--role", "The worker's first role.", metavar="prefill|decode")],
    bind: Annotated[str, option("--bind", "Address to listen at; auto: the one that leads to Redis.")] = "",
) -> None:
    """Run one worker for a fleet that runs on another host. It also takes the options of `decode-worker`."""
    where = Token.decode(token)
    try:
        handle = FleetHandle(where.namespace, where.redis_url, None, None)
        version = ask(handle, lambda fleet: fleet.registry.configuration.read())
        if version is None:
            raise Refused(f"namespace {where.namespace!r} has no configuration in Redis: run `orchestrator up` first")
    except ConfigError as error:  # Redis or the configuration may be there later
        from orchestrator.store.client import RedisUnfit

        final = isinstance(error.__cause__, RedisUnfit)
        report_exit("orchestrator worker", str(error), final)
        raise typer.Exit(2 if final else EXIT_AGAIN) from None
    tree: dict[str, Any] = version.config
    tree["redis"] = tree.get("redis", {}) | {"url": where.redis_url}
    parse_config(tree)
    listens = bind or next((address for address in _ALL if tree["workers"].get("bind") == address), "auto")
    # The configuration has the password: on no disk and in no command line.
    file = os.memfd_create("pd-config", 0)
    os.write(file, msgspec.json.encode(tree))
    os.set_inheritable(file, True)
    os.environ.pop("PD_JOIN", None)
    command = [sys.executable, "-m", "workers.main", role.value, "--config", f"/proc/self/fd/{file}", "--bind", listens]
    command += ["--generation", str(version.generation)]
    os.execv(sys.executable, [*command, *context.args])  # noqa: S606 - the same interpreter, no shell
