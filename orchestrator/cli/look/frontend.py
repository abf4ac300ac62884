"""Reads the fleet's state from a frontend over HTTP. Frontends are asked before Redis, since they know loads."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import ipaddress
import logging
import os
import socket
import ssl
from collections.abc import AsyncGenerator, Callable
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

import msgspec

from orchestrator.cli.handle import FleetHandle, OpenFleet, ask, fleet_at, open_fleet
from orchestrator.config.access import OPERATOR_KEY, is_loopback
from orchestrator.config.settings import Refused
from orchestrator.wire.addresses import address_towards

log = logging.getLogger("pd.cli")

_TIMEOUT_S = 2.0
_QUIET_S = 5.0  # a frontend whose stream is silent for longer is gone
UNANSWERED = (OSError, http.client.HTTPException, ValueError)  # ValueError: no URL, no JSON, or not what was asked for


async def get(
    handle: FleetHandle,
    url: str,
    path: str,
    statuses: tuple[int, ...] = (HTTPStatus.OK,),
    read: Callable[[bytes], Any] = msgspec.json.decode,
) -> Any:
    """What a frontend answers with one of these statuses, as `read` reads it; None for any other answer, or none."""
    with contextlib.suppress(*UNANSWERED):
        status, body = await asyncio.to_thread(fetch, url, path, operator_key(handle, url))
        if status in statuses:
            return read(body)
        if status == HTTPStatus.UNAUTHORIZED:
            log.warning("%s wants the operator's key: set %s", url, OPERATOR_KEY)
    return None


def fetch(
    url: str, path: str, key: str | None, timeout_s: float = _TIMEOUT_S, body: object = None
) -> tuple[int, bytes]:
    """Status and body of the answer to a GET, or to a POST of this body. Raises what is in `UNANSWERED`."""
    with contextlib.closing(_connection(url, key, timeout_s)) as connection:
        answer = _answer(connection, url, path, key, body)
        return answer.status, answer.read()


def _connection(url: str, key: str | None, timeout_s: float) -> http.client.HTTPConnection:
    """Verifies the server's certificate only where a key leaves this machine, which may not know it."""
    parts = urlsplit(url)
    if parts.scheme != "https":
        return http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout_s)
    trust = ssl.create_default_context()
    trust.check_hostname = key is not None and not leads_here(url)
    trust.verify_mode = ssl.CERT_REQUIRED if trust.check_hostname else ssl.CERT_NONE
    return http.client.HTTPSConnection(parts.hostname or "", parts.port, timeout=timeout_s, context=trust)


def _answer(
    connection: http.client.HTTPConnection, url: str, path: str, key: str | None, body: object = None
) -> http.client.HTTPResponse:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    if body is not None:
        headers["content-type"] = "application/json"
    sent = msgspec.json.encode(body) if body is not None else None
    connection.request("GET" if sent is None else "POST", urlsplit(url).path + path, sent, headers)
    return connection.getresponse()


def operator_key(handle: FleetHandle, url: str) -> str | None:
    """The environment's key, else that of the fleet on this machine. The latter is sent to this machine only."""
    if given := os.environ.get(OPERATOR_KEY):
        return given
    if not is_own_address(url):
        return None
    config = handle.config or fleet_at(urlsplit(url).port)
    return config.security.operator_key if config is not None else None


async def ask_registered(
    handle: FleetHandle, fleet: OpenFleet, path: str, read: Callable[[bytes], Any] = msgspec.json.decode
) -> tuple[str, Any]:
    """The URL of the first registered frontend that answers, and its answer as `get` gives it; None where none does."""
    registered = [frontend.url for frontend in (await fleet.registry.frontends()).values()]
    for url in reachable(registered, handle.redis_url or ""):
        if (answer := await get(handle, url, path, read=read)) is not None:
            return url, answer
    return "", None


def reachable(urls: list[str], redis_url: str) -> list[str]:
    """The URLs that reach this fleet's frontends, each once: with a loopback address another host's is this host."""
    return [url for url in dict.fromkeys(urls) if not leads_here(url) or leads_here(redis_url)]


def with_frontend(handle: FleetHandle) -> FleetHandle:
    """The fleet with the URL of its frontend here or of an option's, else of a registered one. Raises Refused."""
    if handle.url is not None:
        return handle

    async def find(fleet: OpenFleet) -> str:
        url, answer = await ask_registered(handle, fleet, "/fleet")
        if answer is not None:
            return url
        raise Refused(f"no frontend of fleet {handle.namespace!r} answers; name one with --url")

    return msgspec.structs.replace(handle, url=ask(handle, find))


def of_one_model(url: str, seen: dict[str, Any]) -> dict[str, Any]:
    """What `url` answered to `/fleet`. Raises Refused where it is that of several models."""
    if "models" in seen:
        pages = ", ".join(f"{url.rstrip('/')}/models/{model}" for model in seen["models"])
        raise Refused(f"{url}: several models are there; name one: {pages}")
    return seen


async def fleet_status(handle: FleetHandle) -> dict[str, Any]:
    """A frontend's `/fleet`; if none answers the registry's, with null for loads and `no_frontend`. Raises Refused."""
    if handle.url and (seen := await get(handle, handle.url, "/fleet")) is not None:
        return of_one_model(handle.url, seen)
    if handle.redis_url is None:
        raise Refused(f"{handle.url}: no frontend of a fleet answers there; see `orchestrator status --redis URL`")
    from orchestrator.store.operator.shown import worker_status
    from orchestrator.store.planned import rollout_status

    async with open_fleet(handle) as fleet:
        _, seen = await ask_registered(handle, fleet, "/fleet")
        if seen is not None:
            return dict(seen)
        workers = sorted((await fleet.registry.workers()).values(), key=lambda info: (info.role.value, info.id))
        depth, desired = await fleet.queue.depth(), await fleet.registry.desired()
        rollout = await fleet.registry.rollout.read()
        rolled = rollout_status(rollout, await fleet.registry.frontends()) if rollout is not None else None
    named = workers[0].identity.model if workers else None
    return {
        "model": handle.config.name_served if handle.config is not None else named,
        "no_frontend": True,
        "workers": msgspec.to_builtins([worker_status(info) for info in workers]),
        "queue": msgspec.to_builtins(depth),
        "desired": msgspec.to_builtins(desired),
        "rollout": rolled,
    }


async def fleet_stream(url: str, key: str | None) -> AsyncGenerator[tuple[str, dict[str, Any]], None]:
    """The server-sent events of a frontend's `/fleet/stream` as (event, data). Raises what is in `UNANSWERED`."""
    connection = _connection(url, key, _QUIET_S)
    try:
        answer = await asyncio.to_thread(_answer, connection, url, "/fleet/stream", key)
        if answer.status != HTTPStatus.OK:
            raise ValueError(f"it answers {answer.status}")
        event = ""
        while line := (await asyncio.to_thread(answer.readline)).decode():
            if line.startswith("event: "):
                event = line[7:].strip()
            elif line.startswith("data: "):
                yield event, msgspec.json.decode(line[6:])
    finally:
        if connection.sock is not None:  # else the thread would read until it is told something
            with contextlib.suppress(OSError):
                connection.sock.shutdown(socket.SHUT_RDWR)
        connection.close()


def is_own_address(url: str) -> bool:
    """Whether it leads to an address of this machine; a name counts as another's."""
    host = urlsplit(url).hostname
    if leads_here(url) or host is None:
        return True
    with contextlib.suppress(ValueError):
        return address_towards(str(ipaddress.ip_address(host))) == host
    return False


def leads_here(url: str) -> bool:
    """Whether the URL leads to this host, by what it says. A unix socket does."""
    return is_loopback(urlsplit(url).hostname or "localhost")
