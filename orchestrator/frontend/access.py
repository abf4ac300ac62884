"""Which requests a frontend accepts: by their API key, and by what that key may make at once and per minute.

A request counts for the completions that it makes, its prompts times `n`, since each is a request to the engines.

Paths are of three kinds: health needs no key, clients' paths need an API key, all others need the operator's key. A
page of another site may not use the last kind through its visitor's browser, whether there are keys or not.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
import ipaddress
import logging
import math
import os
import re
import secrets
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, TypeAlias
from urllib.parse import urlsplit

import msgspec

from orchestrator.config.access import (
    LimitsConfig,
    SecurityConfig,
    is_protected,
    read_api_keys,
)
from orchestrator.config.settings import ConfigError
from orchestrator.process.tasks import in_thread

log = logging.getLogger("pd.frontend")

FileState: TypeAlias = "tuple[int, int, int]"  # inode, time of modification in ns, bytes

OPEN = frozenset({"/health", "/ready", "/ping"})
CLIENT_PREFIXES = ("/v1/", "/v2/", "/cohere/")
CLIENT = frozenset(
    "/inference/v1/generate /tokenize /detokenize /pooling /classify /score /rerank /generative_scoring /invocations "
    "/version".split()
)
# Under CLIENT_PREFIXES, but they change the fleet.
OPERATOR = frozenset({"/v1/load_lora_adapter", "/v1/unload_lora_adapter"})

_CANCEL = re.compile(r"/v1/responses/[^/]+/cancel")  # makes nothing, and ends what may have used the limits up
_FILE_CHECK_S = 1.0
_FILE_SLOW_S = 10.0  # then it is logged that the file cannot be read
# A browser's CORS preflight has these headers and no key, and the CORS middleware answers it. Any other OPTIONS request
# reaches mounted apps, which may handle it like a GET, as vLLM's /metrics does.
_PREFLIGHT = frozenset({b"origin", b"access-control-request-method"})
_CHANGES_NOTHING = frozenset({"GET", "HEAD", "OPTIONS"})  # RFC 9110, 9.2.1; vLLM keeps to it


class Refusal(msgspec.Struct, frozen=True):
    """The HTTP answer to a request that is not accepted."""

    status: int  # 400, 401, 403, 413, 429, 500 or 503
    message: str
    retry_after_s: float | None = None
    headers: tuple[tuple[bytes, bytes], ...] = ()  # of the answer


_NEEDS_KEY = Refusal(
    HTTPStatus.UNAUTHORIZED,
    "an API key is needed: send `Authorization: Bearer KEY` (security.api_keys)",
    headers=((b"www-authenticate", b"Bearer"),),
)
_NEEDS_OPERATOR = Refusal(
    HTTPStatus.UNAUTHORIZED,
    "the operator's key is needed: send `Authorization: Bearer KEY` (security.operator_key, or operator.key in the "
    "launcher's run folder)",
    # A browser then asks its user for the key, as a password, and sends it with every request of the dashboard.
    headers=((b"www-authenticate", b'Basic realm="operator, with the operator\'s key as password", charset="UTF-8"'),),
)
_OTHER_SITE = Refusal(
    HTTPStatus.FORBIDDEN,
    "orders are taken from this server's own pages, not from another site's; pages under a host name need "
    "security.operator_key",
)


class Usage(msgspec.Struct):
    """The running completions of one key, and its allowance: how many it may start at once, as of `at` (monotonic)."""

    running: int = 0
    allowance: float = 0.0
    at: float = 0.0


class Admission:
    """A request that was accepted. It counts for one completion, until `count` finds that it makes more.

    `making`: how many it is making now. Call `end` when the request has ended: what it still makes, in the background,
    counts until it is `made`.
    """

    __slots__ = ("_counted", "_ended", "_limits", "_most", "_usage", "making")

    def __init__(self, limits: LimitsConfig, usage: Usage | None = None) -> None:
        """`usage`: of the request's key. Without one the request is not limited."""
        self._limits, self._usage = limits, usage
        self._counted = self._most = 1  # now, and at any time before
        self.making, self._ended = 0, False

    @property
    def limited(self) -> bool:
        return self._usage is not None

    def count(self, now: float) -> Refusal | None:
        """Count all that it is making, or return why its key may not make as many. `now`: monotonic seconds."""
        more = self.making - self._counted
        if self._usage is None or more <= 0:
            return None
        refusal = _take(self._usage, self._limits, more, max(0, self.making - self._most), self.making, now)
        if refusal is None:
            self._counted, self._most = self.making, max(self._most, self.making)
        return refusal

    def made(self, completions: int) -> None:
        self.making -= completions
        if self._ended:
            self.end()

    def end(self) -> None:
        self._ended = True
        if self._usage is not None:
            still = min(self._counted, self.making)
            self._usage.running -= self._counted - still
            self._counted = still


class Access:
    """Call `admit` for each request, and run `follow_keys` beside."""

    def __init__(self, security: SecurityConfig, limits: LimitsConfig, root_path: str = "") -> None:
        """`root_path`: the prefix of paths, unless a proxy removes it. Raises ConfigError for an unreadable file."""
        self._security, self._limits, self._root_path = security, limits, root_path
        # Keys are compared as MACs with a random key, so that the time of a look-up reveals nothing about them.
        self._mac_key = secrets.token_bytes(32)
        self._operator = self._mac(security.operator_key.encode()) if security.operator_key else None
        self._protected = is_protected(security)
        self._clients: frozenset[bytes] = frozenset()
        self._usages: dict[bytes, Usage] = {}
        self._file_state: FileState | None = None
        try:
            self._use(self._read())
        except (OSError, ValueError) as error:
            raise ConfigError(f"security.api_keys_file: expected a file of keys, one per line: {error}") from None

    def admit(self, scope: Mapping[str, Any], now: float) -> Refusal | Admission:
        """The request's admission, or its refusal. `scope`: ASGI's, of http or websocket; `now`: monotonic seconds."""
        path = scope["path"].removeprefix(self._root_path).rstrip("/")
        if path in OPEN:
            return Admission(self._limits)
        headers = dict(reversed(scope["headers"]))  # of headers with the same name the first counts
        if scope.get("method") == "OPTIONS" and headers.keys() >= _PREFLIGHT:
            return Admission(self._limits)
        changing = scope.get("method") not in _CHANGES_NOTHING
        closed = self._protected or self._operator is not None
        foreign = changing and _is_of_another_site(headers, closed)
        given = self._mac(_key_of(headers))
        # A browser sends a password with every request to this server, whichever page made it.
        password = self._mac(b"" if foreign else _password_of(headers))
        is_operator = self._operator is not None and any(
            hmac.compare_digest(mac, self._operator) for mac in (given, password)
        )
        if path in OPERATOR or not (path in CLIENT or path.startswith(CLIENT_PREFIXES)):
            if closed and not is_operator:
                return _NEEDS_OPERATOR
            return _OTHER_SITE if foreign and not is_operator else Admission(self._limits)
        if self._protected and not is_operator and given not in self._clients:
            return _NEEDS_KEY
        if scope.get("method") == "GET" or is_operator or _CANCEL.fullmatch(path):
            return Admission(self._limits)
        return self._limited(given if self._protected else b"", now)

    def _limited(self, key: bytes, now: float) -> Refusal | Admission:
        usage = self._usages.setdefault(key, Usage(allowance=self._limits.per_minute_per_key or math.inf, at=now))
        return _take(usage, self._limits, 1, 1, 1, now) or Admission(self._limits, usage)

    async def follow_keys(self) -> None:
        """Take the keys of `api_keys_file` whenever it has changed, until cancelled. A thread of its own reads it: the
        file may lie on a mount that hangs."""
        while self._security.api_keys_file is not None:
            await asyncio.sleep(_FILE_CHECK_S)
            reading = asyncio.ensure_future(in_thread(self._read))
            await asyncio.wait({reading}, timeout=_FILE_SLOW_S)
            if not reading.done():
                log.error("security.api_keys_file: not read within %g s; the keys of before stay valid", _FILE_SLOW_S)
            try:
                self._use(await reading)
            except Exception as error:  # also where no thread can be started, which may pass: a key is revoked by this
                if self._file_state is not None:
                    log.error("security.api_keys_file: %s; the keys of before stay valid", error)
                self._file_state = None

    def _read(self) -> tuple[frozenset[bytes], FileState | None] | None:
        """The MACs of all keys and the state of their file; None if that is the same. Raises OSError, ValueError."""
        state = None
        if (path := self._security.api_keys_file) is not None:
            found = os.stat(path)
            state = (found.st_ino, found.st_mtime_ns, found.st_size)
            if state == self._file_state:
                return None
        return frozenset(self._mac(key.encode()) for key in read_api_keys(self._security)), state

    def _use(self, read: tuple[frozenset[bytes], FileState | None] | None) -> None:
        if read is not None:
            self._clients, self._file_state = read
            self._usages = {key: usage for key, usage in self._usages.items() if key in self._clients or not key}

    def _mac(self, key: bytes) -> bytes:
        return hashlib.blake2b(key, key=self._mac_key).digest()


def _take(usage: Usage, limits: LimitsConfig, more: int, new: int, whole: int, now: float) -> Refusal | None:
    """Count `more` completions of a request that makes `whole`, of which `new` count for the minute. Returns why that
    may not be, having counted nothing."""
    at_once, per_minute = limits.concurrent_per_key, limits.per_minute_per_key
    for name, limit in (("concurrent_per_key", at_once), ("per_minute_per_key", per_minute)):
        if limit is not None and whole > limit:
            return Refusal(
                HTTPStatus.BAD_REQUEST,
                f"this request makes {whole} completions, its prompts times n, and limits.{name} allows {limit}: "
                "send fewer prompts or choices at a time",
            )
    if at_once is not None and usage.running + more > at_once:
        others = usage.running - (whole - more)
        return _too_many(
            f"this key's requests make {others} completions already and this one {whole}, of {at_once} at once "
            "(limits.concurrent_per_key)",
            1.0,
        )
    if per_minute is not None:
        usage.allowance = min(per_minute, usage.allowance + (now - usage.at) * per_minute / 60)
        usage.at = now
        if usage.allowance < new:
            return _too_many(
                f"this key's requests may make {per_minute} completions a minute (limits.per_minute_per_key)",
                (new - usage.allowance) * 60 / per_minute,
            )
        usage.allowance -= new
    usage.running += more
    return None


def _too_many(message: str, retry_after_s: float) -> Refusal:
    return Refusal(HTTPStatus.TOO_MANY_REQUESTS, message, retry_after_s)


def _key_of(headers: Mapping[bytes, bytes]) -> bytes:
    """The API key that the client sent; empty if there is none."""
    scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
    return token.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"").strip()


def _password_of(headers: Mapping[bytes, bytes]) -> bytes:
    """The password of basic authentication, as browsers send it; empty if there is none."""
    scheme, _, encoded = headers.get(b"authorization", b"").partition(b" ")
    if scheme.lower() != b"basic":
        return b""
    try:
        return base64.b64decode(encoded, validate=True).partition(b":")[2]
    except binascii.Error:
        return b""


def _is_of_another_site(headers: Mapping[bytes, bytes], closed: bool) -> bool:
    """Whether a browser sent the request for a page that is not this server's.

    The owner of a host name can make it lead here after their page was loaded (DNS rebinding). A browser sends a key
    only to the name that it was entered for. Without a key (not `closed`) only pages of an IP address or of localhost
    are ours.
    """
    if headers.get(b"sec-fetch-site", b"none") not in (b"same-origin", b"none"):
        return True
    origin = headers.get(b"origin")
    if origin is None:
        return False
    try:
        site = urlsplit(origin.decode("latin-1"))
        name = site.hostname or ""
    except ValueError:
        return True
    ours = site.netloc.lower() == headers.get(b"host", b"").decode("latin-1").lower()
    return not ours or not (closed or _is_address_or_localhost(name))


def _is_address_or_localhost(name: str) -> bool:
    """Whether it is an IP address or localhost, and not a name that somebody else can make lead here."""
    try:
        return name == "localhost" or bool(ipaddress.ip_address(name))
    except ValueError:
        return False
