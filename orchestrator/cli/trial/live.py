"""Reads a simulation's input from a running fleet: its workers' timing and its latest requests."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import msgspec

from orchestrator.cli.handle import find_fleet
from orchestrator.cli.look.frontend import UNANSWERED, fetch, of_one_model, operator_key
from orchestrator.config.access import OPERATOR_KEY
from orchestrator.config.settings import ConfigError
from orchestrator.simulator.engine.profile import PROFILES, Profile, load_profile
from orchestrator.simulator.trace import Arrival, Load

_TIMEOUT_S = 10.0
LATEST = 1000  # requests asked for
MIN_REQUESTS = 20  # fewer give no useful figures
# What `/fleet` tells of each engine, as a profile has it too; beside the number of its blocks and the rate of its link.
_OF_ENGINES = (
    "block_size",
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_model_len",
    "adapter_slots",
    "kv_bytes_per_token",
)


def live_load(url: str) -> Load:
    """The latest requests of the frontends at `url`, whose logs tell no shared prefixes. Raises ConfigError."""
    of_one_model(url, _get(url, "/fleet"))
    ended = [line for line in _ended(url) if line.get("output_tokens")]
    if len(ended) < MIN_REQUESTS:
        raise ConfigError(
            f"{url}: {len(ended)} requests have ended there, at least {MIN_REQUESTS} are needed; or give --trace"
        )
    first = min(line["arrived_at"] for line in ended)
    # What was cached need not be computed. Prompts that shared nothing are the nearest load that the log can tell.
    arrivals = [
        Arrival(
            line["arrived_at"] - first,
            max(1, line["prompt_tokens"] - line.get("cached_tokens", 0)),
            line["output_tokens"],
        )
        for line in ended
    ]
    arrivals.sort(key=lambda arrival: arrival.at)
    if arrivals[-1].at <= 0:
        raise ConfigError(f"{url}: all requests came at the same moment, so they have no rate; give --trace")
    return Load("live", arrivals, 0)


def _ended(url: str) -> list[dict[str, Any]]:
    told: list[dict[str, Any]] = _get(url, f"/requests?latest={LATEST}").get("requests", [])
    return told


def live_profile(url: str) -> Profile:
    """What the fleet at `url` has measured of its engines, and what these have. Raises ConfigError."""
    base = with_engines_of(url, _get(url, "/fleet"), load_profile(PROFILES / "h100-llama-8b.json"))
    if base is None:
        raise ConfigError(f"{url}: no worker is there, or a frontend of an older release; give --profile")
    speed = _get(url, "/predictions").get("speed", {})
    if not speed.get("prefill_s_per_token"):
        raise ConfigError(f"{url}: no worker of the fleet has measured its engine; give --profile")
    return msgspec.structs.replace(
        base,
        name="live",
        origin=f"Measured by the workers of {url} when they started; {base.origin}.",
        step_s=speed["step_s"],
        prefill_s_per_token=speed["prefill_s_per_token"],
        attention_s=0.0,
        prompt_s=max(0.0, speed["prefill_s"] - speed["step_s"]),
        decode_s_per_seq=speed["step_s_per_sequence"],
        kv_s_per_token=0.0,
    )


def with_engines_of(url: str, fleet: dict[str, Any], base: Profile) -> Profile | None:
    """A profile with the memory and limits of the engine that has least KV memory, and the fastest link, of what
    `/fleet` at `url` told. `origin` says so. None where it does not tell them. Raises Refused for several models."""
    workers = of_one_model(url, fleet).get("workers", [])
    if not workers or any(name not in worker for worker in workers for name in _OF_ENGINES):
        return None
    least = min(workers, key=lambda worker: worker["blocks_total"] * worker["block_size"])
    link = max(worker["link_bytes_per_s"] or 0.0 for worker in workers)
    carried = "measured" if link else f"that of {base.name}, since no KV was sent in the last minutes"
    return msgspec.structs.replace(
        base,
        origin=f"memory and limits are those of its engines, the link is {carried}",
        blocks=least["blocks_total"],
        link_bytes_per_s=link or base.link_bytes_per_s,
        **{name: least[name] for name in _OF_ENGINES},
    )


def _get(url: str, path: str) -> dict[str, Any]:
    url = url.rstrip("/")
    try:
        status, body = fetch(url, path, operator_key(find_fleet(None, None, url), url), _TIMEOUT_S)
        told = msgspec.json.decode(body, type=dict[str, Any]) if status == HTTPStatus.OK else {}
    except UNANSWERED as error:
        raise ConfigError(f"{url}{path}: does not answer ({error}); name a frontend of a running fleet") from None
    if status == HTTPStatus.UNAUTHORIZED:
        raise ConfigError(f"{url}{path}: needs the operator's key; set {OPERATOR_KEY}")
    if status != HTTPStatus.OK:
        raise ConfigError(f"{url}{path}: answers {status}; name a frontend of a running fleet")
    return told
