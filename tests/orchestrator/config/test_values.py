"""Which URLs of Redis, hosts and keys are taken, and what is said of the others."""

import pytest

from orchestrator.config.values import check_redis_url, find_wrong_address, is_host, is_key


@pytest.mark.parametrize(
    "url",
    [
        "redis://",
        "redis://h",
        "redis://:p%40@h:6379/2",
        "rediss://user:p@[::1]:6379/0?ssl_cert_reqs=none",
        "unix:///run/redis.sock?db=1",
        "redis+sentinel://a,b:26379/service/0",
        "rediss+cluster://user:p@a:1,b",
    ],
)
def test_redis_urls_are_taken(url: str) -> None:
    check_redis_url(url)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("localhost:6379", "expected redis://, rediss:// or unix://"),
        ("http://h", "expected redis://, rediss:// or unix://"),
        ("redis+raft://h", "expected redis://, rediss:// or unix://"),
        ("unix://", "expected the path of a socket"),
        ("unix+cluster:///a", "expected the path of a socket"),
        ("redis://h:0", "expected a port from 1 to 65535 in 'h:0'"),
        ("redis://h:port", "expected a port from 1 to 65535"),
        ("redis://h h", "expected HOST:PORT, got 'h h'"),
        ("redis://a,b", "several hosts are those of redis\\+sentinel:// or redis\\+cluster://"),
        ("redis://:pa/ss@h", "a password's / is written %2F"),
        ("redis+sentinel://a:1", "the service's name is missing"),
        ("redis+cluster://a,", "expected HOST:PORT, got ''"),
    ],
)
def test_url_that_leads_to_no_redis_is_refused(url: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        check_redis_url(url)


def test_password_is_not_shown() -> None:
    assert "secret" not in str(find_wrong_address("redis://:secret@h:0", {}))


@pytest.mark.parametrize(
    ("text", "taken"),
    [
        ("10.0.0.1", True),
        ("::1", True),
        ("node-1.local", True),
        ("node-1.local.", True),
        ("a..b", False),
        (f"{'a' * 64}.local", False),
        ("300.1.1.1", False),
        ("a b", False),
        ("http://a", False),
    ],
)
def test_hosts(text: str, taken: bool) -> None:
    assert is_host(text) == taken
    assert (find_wrong_address("embedded", {"workers.bind": text}) is None) == taken


@pytest.mark.parametrize(("text", "taken"), [("sk-a!~", True), ("a b", False), ("a\n", False), ("\u00fc", False)])
def test_keys(text: str, taken: bool) -> None:
    assert is_key(text) == taken
