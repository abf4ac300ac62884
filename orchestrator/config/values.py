"""The kinds of values that keys of the configuration hold, each with its bounds: numbers, text, hosts, URLs, labels.

A worker's host is a label.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping
from typing import Annotated
from urllib.parse import urlsplit

from msgspec import Meta

# A shorter wait is none; the longest is eleven days, whose milliseconds fit into the 31 bits that ZMQ has for them.
Seconds = Annotated[float, Meta(ge=0.0001, le=1_000_000)]
Count = Annotated[int, Meta(ge=0, le=1_000_000_000)]
Positive = Annotated[int, Meta(ge=1, le=1_000_000_000)]
Bytes = Annotated[int, Meta(ge=1, le=1_000_000_000_000)]
BytesOrNone = Annotated[int, Meta(ge=0, le=1_000_000_000_000)]
Amount = Annotated[float, Meta(ge=0, le=1_000_000)]  # a weight, a cost: may be nothing
Factor = Annotated[float, Meta(ge=0.001, le=1_000_000)]  # something is divided by it, or grows with it
Share = Annotated[float, Meta(gt=0, lt=1)]
MAX_WORKERS = 10_000  # of a role
Workers = Annotated[int, Meta(ge=0, le=MAX_WORKERS)]
SomeWorkers = Annotated[int, Meta(ge=1, le=MAX_WORKERS)]

# Names that may become part of a Redis key and of a file's name: never a path.
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_.-]*\Z"
_LINE_PATTERN = r"^[^\x00-\x1f\x7f-\x9f\u2028\u2029]*\Z"
# What a header can carry as it is. A line break at the end, as of a file that was pasted, would let nobody in.
_KEY_PATTERN = r"^[!-~]*\Z"
_PAIRING_PATTERN = r"^(cost|strict:[A-Za-z0-9][A-Za-z0-9_.-]*)\Z"
_PORTS_PATTERN = r"^\d{1,5}-\d{1,5}\Z"
# What a header says as it is, so ASCII only. No more of it is read; it may be empty.
_TENANT_PATTERN = r"^([!-~]([ -~]*[!-~])?)?\Z"
Tenant = Annotated[str, Meta(pattern=_TENANT_PATTERN, max_length=100)]
Name = Annotated[str, Meta(pattern=NAME_PATTERN, max_length=64)]
Text = Annotated[str, Meta(min_length=1, max_length=4096, pattern=_LINE_PATTERN)]
Ports = Annotated[str, Meta(pattern=_PORTS_PATTERN)]
Pairing = Annotated[str, Meta(pattern=_PAIRING_PATTERN)]
Key = Annotated[str, Meta(min_length=1, max_length=4096, pattern=_KEY_PATTERN)]  # an empty one would let everybody in

KEY_IS = "of printable ASCII characters without spaces"
PATTERNS = {  # in words
    NAME_PATTERN: "of letters, digits, '_', '.' and '-', a letter or digit first",
    _LINE_PATTERN: "of one line without control characters",
    _KEY_PATTERN: KEY_IS,
    _TENANT_PATTERN: "of printable ASCII characters without spaces at its ends",
    _PAIRING_PATTERN: "like cost or strict:rack",
    _PORTS_PATTERN: "like 20000-20999",
}

# Longer labels, and empty ones, are a UnicodeError where a name is looked up.
_HOST_NAME = re.compile(r"(?=.*[A-Za-z])(?=.{1,253}\Z)[A-Za-z0-9_][A-Za-z0-9_-]{0,62}(\.[A-Za-z0-9_-]{1,63})*\.?\Z")
_REDIS_URLS = "redis://, rediss:// or unix://, or with several hosts redis+sentinel:// or redis+cluster://"


def is_key(text: str) -> bool:
    """Whether clients can send it as an API key."""
    return re.search(_KEY_PATTERN, text) is not None


def is_host(text: str) -> bool:
    """Whether it is an address, or may be the name of a host."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return _HOST_NAME.match(text) is not None
    return True


def find_wrong_address(redis_url: str, hosts: Mapping[str, str | None]) -> str | None:
    """The first value that is no address on any host: its key, what is expected, and the value. None if all may be."""
    try:
        if redis_url != "embedded":
            check_redis_url(redis_url, or_else="'embedded', ")
    except ValueError as error:
        return f"redis.url: {error}, got {masked(redis_url)!r}"
    for key, host in hosts.items():
        if host is not None and not is_host(host):
            return f"{key}: expected an address or the name of a host, got {host!r}"
    return None


def masked(url: str) -> str:
    """The URL without its password, for messages; also without one that is written wrongly."""
    return re.sub(r"(?<=password=)[^&]*", "***", re.sub(r"(?<=://)([^/@:]*):.*@", r"\1:***@", url))


def check_redis_url(url: str, or_else: str = "") -> None:
    """Raises ValueError for a URL that leads to no Redis, whatever runs. `or_else`: what may stand in its place."""
    scheme, _, kind = url.partition("://")[0].partition("+")
    if "://" not in url or scheme not in ("redis", "rediss", "unix") or kind not in ("", "sentinel", "cluster"):
        raise ValueError(f"expected {or_else}{_REDIS_URLS}")
    parts = urlsplit(url)
    if scheme == "unix":
        if kind or not parts.path.strip("/"):
            raise ValueError("expected the path of a socket after unix://")
        return
    if "@" in parts.path + parts.fragment or ("@" in parts.query and "@" not in parts.netloc):
        # A parser could take part of the password for a port or a host.
        raise ValueError("a password's / is written %2F, its ? %3F and its # %23")
    hosts = parts.netloc.rpartition("@")[2].split(",")
    if len(hosts) > 1 and not kind:
        raise ValueError("several hosts are those of redis+sentinel:// or redis+cluster://")
    for host in hosts:
        _check_host_and_port(host, may_be_empty=not kind)
    if kind == "sentinel" and not parts.path.strip("/").partition("/")[0]:
        raise ValueError("the service's name is missing: redis+sentinel://HOST:PORT/SERVICE")


def _check_host_and_port(text: str, *, may_be_empty: bool) -> None:
    """Without a host a URL means this one. Raises ValueError."""
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname or "", parts.port
    except ValueError:  # no number, or more than 65535
        host, port = "", 0
    if port == 0:
        raise ValueError(f"expected a port from 1 to 65535 in {text!r}")
    if not (is_host(host) or (may_be_empty and not host)):
        raise ValueError(f"expected HOST:PORT, got {text!r}")


HOST = "host"
_STRICT = "strict:"


def labels_of(host: str, given: Iterable[str]) -> dict[str, str]:
    """A worker's labels by name, in its order, of `NAME=VALUE`; one named host stands for its address."""
    return dict(sorted(({HOST: host} | dict(label.split("=", 1) for label in given)).items()))


def strict_label(pairing: str) -> str:
    """The label whose value both ends of a link must share, by routing.pairing; empty where any link may be used."""
    return pairing.removeprefix(_STRICT) if pairing.startswith(_STRICT) else ""
