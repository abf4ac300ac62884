"""Messages between a launcher and the runners of its processes, as MessagePack, so that none is a pickle."""

from __future__ import annotations

from typing import Union

import msgspec

from orchestrator.config.settings import Config
from orchestrator.types import Role


class RunWorker(msgspec.Struct, tag="worker", frozen=True):
    """To a runner: run this worker on your node. The model of `config` is not resolved: its path depends on the
    node. `ranks`: the workers of its unit; none for a worker that is alone."""

    config: Config
    name: str
    role: Role
    generation: int = 0
    ranks: tuple[str, ...] = ()


class RunFrontend(msgspec.Struct, tag="frontend", frozen=True):
    """To a runner: run this frontend on your node."""

    config: Config
    name: str
    index: int
    generation: int = 0


class Started(msgspec.Struct, tag="started", frozen=True):
    """From a runner: the process runs, by this order or by an earlier one."""

    pid: int
    identity: str  # see orchestrator.process.parent


class NotStarted(msgspec.Struct, tag="not_started", frozen=True):
    """From a runner: it could not be started. `never`: its node cannot run this program."""

    reason: str
    never: bool = False


class Ended(msgspec.Struct, tag="ended", frozen=True):
    """From a runner: how the process ended. `code` is negative for a signal, `reason` what the process said."""

    code: int
    reason: str | None = None
    final: bool = False


Order = Union[RunWorker, RunFrontend]
Reply = Union[Started, NotStarted, Ended]

encode = msgspec.msgpack.Encoder().encode
decode_order = msgspec.msgpack.Decoder(Order).decode
decode_reply = msgspec.msgpack.Decoder(Reply).decode
