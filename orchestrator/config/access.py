"""The sections `security` and `limits` of the configuration: who may use a fleet, how much, and with which keys."""

from __future__ import annotations

import ipaddress
import os
import secrets
from typing import Literal

import msgspec

from orchestrator.config.values import KEY_IS, Bytes, Factor, Key, Positive, Tenant, Text, is_key
from orchestrator.process.files import KEYS_BYTES, read_plain_file

# Environment variables. The first overrides security.operator_key; the second, vLLM's own, is one more API key.
OPERATOR_KEY, API_KEY = "PD_OPERATOR_KEY", "VLLM_API_KEY"
SECRETS = ("security.api_keys", "security.operator_key")  # keys of the configuration whose values are never shown
REDIS_URL = "PD_REDIS_URL"  # may hold a password; used where neither an option nor the file names a Redis


class SecurityConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Who may talk to the fleet's processes; see docs/security.md."""

    # Frontends, workers and KV handshakes: encrypted, for members of the fleet only; none: open to everybody.
    mesh: Literal["curve", "none"] = "curve"
    trust_network: bool = False  # needed for mesh: none where workers listen on more than loopback
    # With either, clients must send one of the keys: `Authorization: Bearer KEY` or `x-api-key: KEY`.
    api_keys: list[Key] = []
    api_keys_file: Text | None = None  # one key per line, # begins a comment; reloaded when it changes
    # For /metrics, /fleet and control calls. `up` makes one where there are API keys or frontends listen on a network.
    operator_key: Key | None = None


class LimitsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Bounds on requests. *Per key* counts one API key at one frontend; without API keys, all clients together. A
    request counts for its completions there: its prompts times `n`."""

    max_body_bytes: Bytes = 67_108_864  # a request with a larger body is answered with 413
    max_n: Positive = 128  # a request for more choices (n), or more beams, is answered with 400
    # Weights by tenant (header `x-tenant`), "*" for the others: under overload each gets its share. Default: no shares.
    shares: dict[Tenant, Factor] = {}
    concurrent_per_key: Positive | None = None  # more completions at once are answered with 429
    per_minute_per_key: Positive | None = None  # more completions, after a burst of as many, are answered with 429


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def read_api_keys(security: SecurityConfig) -> frozenset[str]:
    """Those of the configuration, and of its file now. Raises OSError; ValueError for one that no client can send."""
    keys = set(security.api_keys)
    if security.api_keys_file is not None:
        for number, line in enumerate(read_plain_file(security.api_keys_file, KEYS_BYTES).split("\n"), 1):
            key = line.partition("#")[0].strip(" \t\r")
            if not is_key(key):
                raise ValueError(f"{security.api_keys_file}, line {number}: expected a key {KEY_IS}")
            keys.add(key)
    return frozenset(keys - {""})


def secured(security: SecurityConfig, host: str) -> SecurityConfig:
    """Add the keys of the environment, and make an operator's key where API keys exist or `host` is not loopback."""
    api_keys, operator_key = list(security.api_keys), os.environ.get(OPERATOR_KEY) or security.operator_key
    if (key := os.environ.get(API_KEY)) and key not in api_keys:
        api_keys.append(key)
    security = msgspec.structs.replace(security, api_keys=api_keys, operator_key=operator_key)
    if operator_key is None and (is_protected(security) or not is_loopback(host)):
        security = msgspec.structs.replace(security, operator_key=secrets.token_urlsafe(32))
    return security


def is_protected(security: SecurityConfig) -> bool:
    """Whether clients need a key. A file without keys lets nobody in."""
    return bool(security.api_keys) or security.api_keys_file is not None
