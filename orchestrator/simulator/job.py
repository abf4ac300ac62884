"""What is simulated: the settings of one run, and one request on its way through it."""

from __future__ import annotations

from typing import Literal

import msgspec

from orchestrator.config.settings import SLOConfig
from orchestrator.policy.candidate import EXPECTED_OUTPUT_TOKENS
from orchestrator.simulator.profile import Profile
from orchestrator.simulator.stack import Stack
from orchestrator.simulator.stay import Stay
from orchestrator.simulator.trace import Arrival
from orchestrator.types import RequestInfo


class FleetError(ValueError):
    """An impossible fleet or setting."""


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What is simulated, beside the load. Times in seconds."""

    prefill: int
    decode: int
    profile: Profile
    stack: Stack
    seed: int = 0
    report_age_s: float = 0.1  # load reports are this old at most, and half of it on average
    transfer: Literal["chunk", "whole"] = "whole"
    first_token: Literal["prefill", "decode"] = "decode"  # whose token a client gets first, of a remote prefill
    claim_batches: float = 2.0
    slo: SLOConfig | None = None  # default: the profile's
    itl_weight: float = 0.02
    max_waiting_per_worker: int = 128
    remote_prefill_min_tokens: int = 256
    max_queued_prefill_tokens: int = 1 << 60


class Job:
    """One request on its way: what it is, where it stands, and what happened to it."""

    __slots__ = (
        "arrival",
        "backlog_s",
        "bound",
        "claimed",
        "done_at",
        "enqueued_at",
        "first_at",
        "generated",
        "hits",
        "hits_at",
        "id",
        "local_tokens",
        "outcome",
        "placed_at",
        "reason",
        "stay",
        "uncached",
    )

    def __init__(self, number: int, arrival: Arrival) -> None:
        self.id = number
        self.arrival = arrival
        self.generated = 0  # output tokens that the client has
        self.first_at: float | None = None
        self.done_at: float | None = None
        self.outcome = ""
        self.reason = ""
        self.hits: dict[str, int] = {}  # cached tokens by worker
        self.hits_at = 0.0
        self.uncached = 0
        self.backlog_s = 0.0
        self.placed_at = 0.0
        self.enqueued_at = -1.0
        self.local_tokens = 0
        self.claimed = False
        self.bound: str | None = None  # decode worker chosen at arrival (`push`)
        self.stay: Stay | None = None  # where it decodes, or will

    @property
    def prompt_tokens(self) -> int:
        return self.arrival.prompt_tokens + self.generated

    @property
    def output_tokens(self) -> int:
        return self.arrival.output_tokens - self.generated

    def info(self) -> RequestInfo:
        """What a router knows of it: not how much it will generate."""
        return RequestInfo(
            str(self.id), self.prompt_tokens, 16 * EXPECTED_OUTPUT_TOKENS, self.arrival.at, self.arrival.priority
        )
