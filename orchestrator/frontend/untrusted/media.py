"""Where a frontend fetches the images, videos and sounds that a request names by URL: at public addresses.

A client would otherwise have the frontend ask Redis, workers, or a cloud's metadata service for it. vLLM's own
`allowed_media_domains` names the hosts that media may come from instead, whatever their addresses. Not responsible for
files (`allowed_local_media_path`) and sizes, which are vLLM's.
"""

from __future__ import annotations

import functools
import ipaddress
import logging
import os
import socket
from typing import Any, NoReturn
from urllib.parse import urlsplit
from urllib.request import getproxies

import aiohttp
from aiohttp.abc import ResolveResult
from aiohttp.resolver import ThreadedResolver
from vllm.connections import HTTPConnection
from vllm.exceptions import VLLMValidationError
from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY, MediaConnector

from orchestrator.config.access import is_loopback
from orchestrator.config.server_args import MEDIA_CONNECTOR

log = logging.getLogger("pd.frontend")

_NAME = "pd_public"
_NAT64 = ipaddress.ip_network("64:ff9b::/96")  # RFC 6052


def fetch_public_only(host: str) -> None:
    """Let vLLM fetch media with this file's connector, unless the environment names another: that is logged where
    others than this machine's users reach `host`. Before vLLM reads the environment."""
    if (connector := os.environ.setdefault(MEDIA_CONNECTOR, _NAME)) != _NAME and not is_loopback(host):
        log.warning("%s=%s: clients choose what this frontend connects to", MEDIA_CONNECTOR, connector)


@MEDIA_CONNECTOR_REGISTRY.register(_NAME)
class PublicMedia(MediaConnector):
    """vLLM's connector over a `PublicConnection`."""

    def __init__(
        self,
        media_io_kwargs: dict[str, dict[str, Any]] | None = None,
        *,
        allowed_local_media_path: str = "",
        allowed_media_domains: list[str] | None = None,
        **budgets: Any,  # of one request, from vLLM 0.33
    ) -> None:
        super().__init__(
            media_io_kwargs,
            _connection(frozenset(allowed_media_domains or ())),
            allowed_local_media_path=allowed_local_media_path,
            allowed_media_domains=allowed_media_domains,
            **budgets,
        )


class PublicConnection(HTTPConnection):
    """Fetches from hosts named in `allowed`, or, if it is empty, from public addresses. Redirects are no exception.

    Raises VLLMValidationError, which a client is answered with as 400, for any other.
    """

    _async_client: aiohttp.ClientSession | None

    def __init__(self, allowed: frozenset[str]) -> None:
        super().__init__()
        self._allowed = allowed

    async def get_async_client(self) -> aiohttp.ClientSession:
        if self._async_client is None:
            names = aiohttp.TCPConnector(resolver=_PublicNames(self._allowed))
            self._async_client = aiohttp.ClientSession(trust_env=True, connector=names, middlewares=(self._check,))
        return self._async_client

    def get_sync_client(self) -> NoReturn:
        raise RuntimeError("frontends fetch media in their event loop only, where the address is checked")

    async def _check(
        self, request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        """Called for the request and each redirect. A name's addresses are checked when it is resolved."""
        host = request.url.host or ""
        if host not in self._allowed:
            # Some spellings of an IP address, as 2130706433, are resolved by the kernel's interface alone.
            is_number = ":" in host or host.replace(".", "").isdigit()
            if self._allowed or (is_number and not _is_public(host)):
                _refuse(host)
        return await handler(request)


class _PublicNames(ThreadedResolver):
    """What is connected to is what was checked, whatever the name leads to a moment later (DNS rebinding)."""

    def __init__(self, allowed: frozenset[str]) -> None:
        super().__init__()
        self._allowed = allowed

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        found = await super().resolve(host, port, family)
        # A proxy resolves names itself, and decides what may be reached.
        if host in self._allowed or host in {urlsplit(url).hostname for url in getproxies().values()}:
            return found
        return [each for each in found if _is_public(each["host"])] or _refuse(host)


@functools.cache
def _connection(allowed: frozenset[str]) -> PublicConnection:
    return PublicConnection(allowed)


def _is_public(address: str) -> bool:
    """Whether anybody can reach it: neither private, loopback, link-local nor of a group of hosts."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return False
    if isinstance(found, ipaddress.IPv6Address):
        if found in _NAT64:
            return _is_public(str(ipaddress.IPv4Address(int(found) & 0xFFFFFFFF)))
        if (within := found.ipv4_mapped or found.sixtofour) is not None:
            return _is_public(str(within))
    return found.is_global and not found.is_multicast


def _refuse(host: str) -> NoReturn:
    raise VLLMValidationError(
        f"media are not fetched from {host!r}: it has no public address, or is not among the hosts that media may come "
        "from (frontend.server_args.allowed_media_domains)"
    )
