"""From which addresses a frontend fetches media: vLLM's connector, as the frontend sets it up, and real servers."""

import base64
import logging
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest

pytest.importorskip("vllm")

from aiohttp import web
from aiohttp.resolver import ThreadedResolver
from vllm import envs
from vllm.exceptions import VLLMValidationError
from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY

from orchestrator.frontend.untrusted import media
from orchestrator.frontend.untrusted.media import fetch_public_only

pytestmark = pytest.mark.vllm

PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


class Inside:
    """A server on loopback, as Redis or a metadata service is: what it was asked."""

    def __init__(self, port: int) -> None:
        self.port, self.asked = port, list[str]()


@pytest.fixture
async def inside() -> AsyncIterator[Inside]:
    listener = socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    server = Inside(listener.getsockname()[1])

    async def answer(request: web.Request) -> web.Response:
        server.asked.append(f"{request.host}{request.path}")
        if request.path == "/moved":
            raise web.HTTPFound(request.query["to"])
        return web.Response(body=PIXEL, content_type="image/png")

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.SockSite(runner, listener).start()
    yield server
    await runner.cleanup()


async def fetch(url: str, allowed: list[str] | None = None) -> Any:
    connector = MEDIA_CONNECTOR_REGISTRY.load(envs.VLLM_MEDIA_CONNECTOR, allowed_media_domains=allowed)
    try:
        return await connector.fetch_image_async(url)
    finally:
        if connector.connection._async_client is not None:
            await connector.connection._async_client.close()
        media._connection.cache_clear()


@pytest.fixture(autouse=True)
def set_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_MEDIA_CONNECTOR", "")
    monkeypatch.delenv("VLLM_MEDIA_CONNECTOR")
    monkeypatch.setenv("VLLM_MEDIA_FETCH_MAX_RETRIES", "1")
    fetch_public_only("0.0.0.0")


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1", "localhost", "LOCALHOST.", "2130706433", "0x7f000001", "0x7f.1", "017700000001", "127.1", "0",
        "[::1]", "[::ffff:127.0.0.1]", "[64:ff9b::7f00:1]", "[2002:7f00:1::]", "127.0.0.1.", "user@127.0.0.1",
    ],
)  # fmt: skip
async def test_nothing_is_fetched_from_this_host_however_it_is_spelt(inside: Inside, host: str) -> None:
    with pytest.raises((VLLMValidationError, OSError, ValueError)):
        await fetch(f"http://{host}:{inside.port}/secret")
    assert inside.asked == []


@pytest.mark.parametrize("host", ["169.254.169.254", "10.0.0.1", "[fe80::1]", "[fd00::1]", "100.64.0.1", "224.0.0.1"])
async def test_the_refusal_names_host_and_setting(host: str) -> None:
    with pytest.raises(VLLMValidationError, match=r"not fetched from '.*frontend.server_args.allowed_media_domains"):
        await fetch(f"http://{host}/latest/meta-data")


async def test_named_hosts_may_be_private_and_redirects_may_not_leave_them(inside: Inside) -> None:
    url = f"http://localhost:{inside.port}"
    assert (await fetch(f"{url}/a.png", ["localhost"])).size == (1, 1)
    assert (await fetch(f"{url}/moved?to={url}/b.png", ["localhost"])).size == (1, 1)
    assert inside.asked[-1].endswith("/b.png")
    with pytest.raises(VLLMValidationError, match="127.0.0.1"):
        await fetch(f"{url}/moved?to=http://127.0.0.1:{inside.port}/secret", ["localhost"])
    assert not [path for path in inside.asked if "secret" in path]


async def test_only_public_addresses_of_a_name_are_connected_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are resolved once: there is no second answer that could differ from what was checked."""
    answers = [["10.0.0.1", "198.41.0.4", "127.0.0.1"], ["127.0.0.1"]]

    async def resolve(*_: Any) -> list[Any]:
        return [{"host": address} for address in answers.pop(0)]

    monkeypatch.setattr(ThreadedResolver, "resolve", resolve)
    names = media._PublicNames(frozenset())
    assert [found["host"] for found in await names.resolve("rebinds.example")] == ["198.41.0.4"]
    with pytest.raises(VLLMValidationError, match=r"rebinds\.example"):
        await names.resolve("rebinds.example")


async def test_a_proxy_of_the_environment_is_reached(inside: Inside, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", f"http://localhost:{inside.port}")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    assert (await fetch("http://images.example/a.png")).size == (1, 1)
    assert inside.asked == ["images.example/a.png"]


async def test_vllms_own_connector_is_taken_where_it_is_asked_for(
    inside: Inside, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "pd")  # vLLM's app raises the root's level
    monkeypatch.setenv("VLLM_MEDIA_CONNECTOR", "http")
    fetch_public_only("127.0.0.1")
    assert "clients choose" not in caplog.text
    fetch_public_only("0.0.0.0")
    assert "VLLM_MEDIA_CONNECTOR=http: clients choose what this frontend connects to" in caplog.text
    assert envs.VLLM_MEDIA_CONNECTOR == "http"
