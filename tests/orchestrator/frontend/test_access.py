"""Keys and limits of a frontend: which paths need which key, files of keys that change, and what one key may use."""

import asyncio
import base64
import os
import threading
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, WebSocket
from fastapi.middleware.cors import CORSMiddleware
from prometheus_client import make_asgi_app
from support_wait import until

from orchestrator.config.access import LimitsConfig, SecurityConfig, secured
from orchestrator.config.settings import ConfigError
from orchestrator.frontend import access
from orchestrator.frontend.access import Access, Admission, Refusal
from orchestrator.frontend.edge import EdgeMiddleware

KEYED = SecurityConfig(api_keys=["client-1", "client-2"], operator_key="operator")
CLIENT_PATHS = ["/v1/chat/completions", "/v1/models", "/v1/responses/resp_1", "/v2/rerank", "/tokenize", "/invocations"]
OPERATOR_PATHS = [
    "/metrics", "/metrics/", "/fleet", "/fleet/stream", "/requests", "/dashboard", "/operator/scale",
    "/predictions", "/pause", "/resume", "/reset_prefix_cache", "/start_profile",
    "/v1/load_lora_adapter", "/v1/unload_lora_adapter/", "/inference/v1/abort_requests", "/docs", "/openapi.json", "/",
    "/anything/new", "//v1/models", "/v1",
]  # fmt: skip


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def client(security: SecurityConfig, limits: LimitsConfig = LimitsConfig(), app: Any = None) -> httpx.AsyncClient:
    if app is None:
        app = FastAPI(docs_url=None, openapi_url=None)

        @app.api_route("/{path:path}", methods=["GET", "POST", "OPTIONS"])
        async def answer(path: str) -> str:
            return path

    transport = httpx.ASGITransport(EdgeMiddleware(app, 1000, Access(security, limits)))
    return httpx.AsyncClient(transport=transport, base_url="http://test")


async def status(asked: httpx.AsyncClient, path: str, key: str = "", **headers: str) -> int:
    # As raw as a client can send it: httpx would tidy the path.
    request = asked.build_request("POST", "http://test", headers={**(bearer(key) if key else {}), **headers})
    request.url = httpx.URL("http://test", raw_path=path.encode())
    return (await asked.send(request)).status_code


async def test_every_path_but_health_needs_the_key_of_its_kind():
    async with client(KEYED) as asked:
        for path in access.OPEN:
            assert await status(asked, path) == 200
        for path in CLIENT_PATHS:
            answers = [await status(asked, path, key) for key in ("", "wrong", "client-1", "client-2", "operator")]
            assert answers == [401, 401, 200, 200, 200], path
        for path in OPERATOR_PATHS:
            answers = [await status(asked, path, key) for key in ("", "wrong", "client-1", "operator")]
            assert answers == [401, 401, 401, 200], path


async def test_refusal_is_openai_error_and_names_setting_without_key():
    async with client(KEYED) as asked:
        refused = await asked.post("/v1/completions", headers={**bearer("client-3"), "x-request-id": "mine"})
        assert refused.headers["www-authenticate"] == "Bearer" and refused.headers["x-request-id"] == "mine"
        error = refused.json()["error"]
        assert error["code"] == 401 and "security.api_keys" in error["message"] and "client-" not in refused.text
        operator = await asked.get("/fleet", headers=bearer("client-1"))
        assert operator.status_code == 401 and "security.operator_key" in operator.json()["error"]["message"]


async def test_only_cors_preflight_needs_no_key():
    app = FastAPI()
    app.add_middleware(CORSMiddleware, allow_origins=["*"], allow_methods=["*"])
    app.mount("/metrics", make_asgi_app())  # as vLLM does: it answers whatever the method is
    first = {"origin": "https://chat.example", "access-control-request-method": "POST"}
    async with client(KEYED, app=app) as asked:
        assert (await asked.options("/v1/completions", headers=first)).status_code == 200
        for path in ("/metrics", "/metrics/", "/v1/completions", "/fleet"):
            answer = await asked.options(path)
            assert (answer.status_code, "python_info" in answer.text) == (401, False), path
        assert "python_info" not in (await asked.options("/metrics/", headers=first)).text
        assert "python_info" in (await asked.options("/metrics/", headers=bearer("operator"))).text


async def test_keys_are_accepted_in_both_headers():
    async with client(KEYED) as asked:
        assert await status(asked, "/v1/messages", **{"x-api-key": "client-1"}) == 200
        assert await status(asked, "/v1/messages", authorization="bearer  client-1 ") == 200
        for header in ("client-1", "Basic client-1", "Bearer", "Bearer client-1 client-2"):
            assert await status(asked, "/v1/messages", authorization=header) == 401


async def test_operator_key_protects_operator_paths_only():
    async with client(SecurityConfig()) as asked:
        assert {await status(asked, path) for path in [*CLIENT_PATHS, *OPERATOR_PATHS]} == {200}
    async with client(SecurityConfig(operator_key="operator")) as asked:
        assert {await status(asked, path) for path in CLIENT_PATHS} == {200}
        assert {await status(asked, path) for path in OPERATOR_PATHS} == {401}
    async with client(SecurityConfig(api_keys=["client-1"])) as asked:  # nobody has the operator's key
        assert {await status(asked, path, "client-1") for path in OPERATOR_PATHS} == {401}


def test_required_operator_key_is_generated(monkeypatch: pytest.MonkeyPatch):
    assert secured(SecurityConfig(), "127.0.0.1").operator_key is None
    made = {secured(SecurityConfig(), "0.0.0.0").operator_key, secured(KEYED, "::1").operator_key}
    made.add(secured(SecurityConfig(api_keys_file="/f"), "127.0.0.1").operator_key)
    assert None not in made and len(made) == 3 and "operator" in made
    monkeypatch.setenv("PD_OPERATOR_KEY", "from-outside")
    monkeypatch.setenv("VLLM_API_KEY", "client-9")
    given = secured(KEYED, "127.0.0.1")
    assert given.operator_key == "from-outside" and given.api_keys == ["client-1", "client-2", "client-9"]
    assert secured(given, "127.0.0.1") == given


async def test_key_file_is_reloaded_and_broken_file_keeps_old_keys(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(access, "_FILE_CHECK_S", 0.01)
    file = tmp_path / "keys"
    file.write_text("# of the first team\nfirst  # until May\n\nsecond\n")
    kept = Access(SecurityConfig(api_keys_file=str(file), api_keys=["fixed"]), LimitsConfig())

    def admitted() -> list[bool]:
        keys = ("first", "second", "third", "fixed", "", "# of the first team")
        return [isinstance(kept.admit(scope("/v1/models", key), 0.0), Admission) for key in keys]

    following = asyncio.create_task(kept.follow_keys())
    assert admitted() == [True, True, False, True, False, False]
    rotated = tmp_path / "new"
    rotated.write_text("second\nthird\n")
    os.replace(rotated, file)
    await until(lambda: admitted() == [False, True, True, True, False, False])
    file.unlink()
    await until(lambda: "the keys of before stay valid" in caplog.text)
    await asyncio.sleep(0.1)
    assert admitted() == [False, True, True, True, False, False]
    assert caplog.text.count("the keys of before stay valid") == 1
    file.write_text("")
    await until(lambda: admitted() == [False, False, False, True, False, False])
    caplog.clear()
    file.write_bytes(b"first\n\xff\xff")
    await until(lambda: "the keys of before stay valid" in caplog.text)
    assert admitted() == [False, False, False, True, False, False]
    following.cancel()
    with pytest.raises(ConfigError, match="security.api_keys_file: .*No such file"):
        Access(SecurityConfig(api_keys_file=str(tmp_path / "gone")), LimitsConfig())
    file.write_text("first\nsecond key\n")  # no client could send it
    with pytest.raises(ConfigError, match="keys, line 2: expected a key of printable ASCII characters without spaces"):
        Access(SecurityConfig(api_keys_file=str(file)), LimitsConfig())
    empty = tmp_path / "empty"
    empty.touch()
    async with client(SecurityConfig(api_keys_file=str(empty))) as asked:
        assert await status(asked, "/v1/models") == 401  # a file without keys lets nobody in


async def test_key_file_on_a_mount_that_hangs_holds_nobody_up(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(access, "_FILE_CHECK_S", 0.01)
    monkeypatch.setattr(access, "_FILE_SLOW_S", 0.05)
    file = tmp_path / "keys"
    file.write_text("first\n")
    kept = Access(SecurityConfig(api_keys_file=str(file)), LimitsConfig())
    answers, stat, reading = threading.Event(), os.stat, threading.Event()

    def hangs(path: str) -> os.stat_result:
        if path == str(file):
            reading.set()
            assert answers.wait(30)
        return stat(path)

    monkeypatch.setattr(access, "os", SimpleNamespace(stat=hangs))
    following = asyncio.create_task(kept.follow_keys())
    await until(reading.is_set)
    assert isinstance(kept.admit(scope("/v1/models", "first"), 0.0), Admission)
    await until(lambda: "not read within 0.05 s; the keys of before stay valid" in caplog.text)
    file.write_text("second\n")
    answers.set()
    await until(lambda: isinstance(kept.admit(scope("/v1/models", "second"), 0.0), Admission))
    following.cancel()


async def test_keys_are_followed_on_once_threads_can_be_started_again(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(access, "_FILE_CHECK_S", 0.01)
    file, start = tmp_path / "keys", threading.Thread.start
    file.write_text("first\n")
    kept = Access(SecurityConfig(api_keys_file=str(file)), LimitsConfig())

    def cannot(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", cannot)
    following = asyncio.create_task(kept.follow_keys())
    await until(lambda: "can't start new thread; the keys of before stay valid" in caplog.text)
    monkeypatch.setattr(threading.Thread, "start", start)
    file.write_text("second\n")
    await until(lambda: not isinstance(kept.admit(scope("/v1/models", "first"), 0.0), Admission))
    following.cancel()


async def test_requests_at_once_are_limited_per_key_until_their_streams_have_ended():
    go_on, begun = asyncio.Event(), list[str]()

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"first", "more_body": True})
        begun.append(scope["path"])
        await go_on.wait()
        if scope["path"] == "/v1/breaks":
            raise RuntimeError("in the app")
        await send({"type": "http.response.body", "body": b"last"})

    async with client(KEYED, LimitsConfig(concurrent_per_key=2), app) as asked:
        paths = ("/v1/completions", "/v1/breaks")
        running = [asyncio.create_task(asked.post(path, headers=bearer("client-1"))) for path in paths]
        await until(lambda: len(begun) == 2)
        refused = await asked.post("/v1/completions", headers=bearer("client-1"))
        assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
        assert "limits.concurrent_per_key" in refused.json()["error"]["message"]
        running.append(asyncio.create_task(asked.post("/v1/completions", headers=bearer("client-2"))))
        await until(lambda: len(begun) == 3)
        go_on.set()
        await asyncio.gather(*running, return_exceptions=True)
        for _ in range(5):
            assert (await asked.post("/v1/completions", headers=bearer("client-1"))).status_code == 200


def scope(path: str = "/v1/completions", key: str = "client-1", method: str = "POST") -> dict[str, Any]:
    return {"path": path, "method": method, "headers": [(b"authorization", f"Bearer {key}".encode())]}


def test_requests_per_minute_are_limited_per_key_after_a_burst():
    limited = Access(KEYED, LimitsConfig(per_minute_per_key=6))

    def taken(now: float, **given: str) -> bool:
        admitted = limited.admit(scope(**given), now)
        if isinstance(admitted, Refusal):
            assert admitted.status == 429 and "limits.per_minute_per_key" in admitted.message
            return False
        admitted.end()
        return True

    assert [taken(100.0) for _ in range(7)] == [True] * 6 + [False]
    refused = limited.admit(scope(), 104.0)
    assert isinstance(refused, Refusal) and refused.retry_after_s == pytest.approx(6.0)
    assert taken(110.0) and not taken(110.0)
    assert taken(110.0, key="client-2") and taken(110.0, key="operator") and taken(110.0, method="GET")
    assert [taken(1000.0) for _ in range(7)] == [True] * 6 + [False]  # no more is saved up


def test_limits_without_keys_apply_to_all_clients_together():
    limited = Access(SecurityConfig(), LimitsConfig(concurrent_per_key=1))
    first = limited.admit(scope(key="a"), 0.0)
    assert isinstance(limited.admit(scope(key="b"), 0.0), Refusal)
    assert not isinstance(first, Refusal)
    first.end()
    assert not isinstance(limited.admit(scope(key="b"), 0.0), Refusal)


def test_root_path_of_proxy_is_ignored():
    behind = Access(KEYED, LimitsConfig(), "/pd")
    assert not isinstance(behind.admit(scope("/pd/v1/models"), 0.0), Refusal)
    assert isinstance(behind.admit(scope("/pd/fleet"), 0.0), Refusal)
    assert not isinstance(behind.admit(scope("/pd/health", key=""), 0.0), Refusal)


async def test_a_websocket_needs_a_key_too():
    app = FastAPI()

    @app.websocket("/v1/realtime")
    async def realtime(socket: WebSocket) -> None:
        await socket.accept()
        await socket.close()

    async def opened(key: str) -> str:
        sent: list[Any] = []

        async def receive() -> dict[str, Any]:
            return {"type": "websocket.connect"}

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        headers = scope(key=key)["headers"]
        asked = {
            "type": "websocket",
            "path": "/v1/realtime",
            "headers": headers,
            "query_string": b"",
            "subprotocols": [],
        }
        await EdgeMiddleware(app, 1000, Access(KEYED, LimitsConfig()))(asked, receive, send)
        return sent[0]["type"]

    assert await opened("wrong") == "websocket.close"
    assert await opened("client-1") == "websocket.accept"


def basic(key: str) -> str:
    return "Basic " + base64.b64encode(f"me:{key}".encode()).decode()


async def test_browser_sends_operator_key_from_own_pages_only():
    async with client(KEYED) as asked:
        challenge = (await asked.get("/dashboard")).headers["www-authenticate"]
        assert challenge.startswith("Basic realm=")
        given = {"authorization": basic("operator")}
        assert (await asked.get("/dashboard", headers=given)).status_code == 200
        assert (await asked.get("/fleet/stream", headers={"authorization": basic("client-1")})).status_code == 401
        for origin, code in (("http://test", 200), ("https://evil.example", 401), ("null", 401)):
            for path in ("/operator/scale", "/v1/completions"):
                assert (await asked.post(path, headers={**given, "origin": origin})).status_code == code
        for garbage in ("Basic", "Basic \xff", "Basic b3BlcmF0b3I=", "Basic !!"):
            assert (await asked.get("/fleet", headers={"authorization": garbage.encode("latin-1")})).status_code == 401


@pytest.mark.parametrize(
    ("page", "headers", "code"),
    [
        ("http://127.0.0.1:8000", {}, 200),
        ("http://[::1]:8000", {}, 200),
        ("http://LocalHost:8000", {}, 200),
        ("http://fleet.example:8000", {}, 403),  # a name that leads here, maybe only since the page was loaded
        ("http://127.0.0.1:8000", {"origin": "http://elsewhere.example"}, 403),
        ("http://127.0.0.1:8000", {"origin": "http://127.0.0.1:9000"}, 403),
        ("http://127.0.0.1:8000", {"origin": "null"}, 403),
        ("http://127.0.0.1:8000", {"origin": "http://[bad"}, 403),
        ("http://127.0.0.1:8000", {"sec-fetch-site": "cross-site"}, 403),
        ("http://127.0.0.1:8000", {"sec-fetch-site": "same-site"}, 403),
        ("http://127.0.0.1:8000", {"sec-fetch-site": "same-origin"}, 200),
    ],
)
async def test_orders_of_other_sites_pages_are_refused_without_keys(
    page: str, headers: dict[str, str], code: int
) -> None:
    """Nothing but what a browser says of the page keeps it from steering the fleet of whoever visits it."""
    async with client(SecurityConfig()) as asked:
        sent = {"host": page.partition("://")[2], "origin": page, **headers}
        for path in OPERATOR_PATHS:
            assert await status(asked, path, **sent) == code, path
        for path in CLIENT_PATHS:  # vLLM's server lets pages of any site ask
            assert await status(asked, path, **sent) == 200, path
        assert (await asked.get("/fleet", headers=sent)).status_code == 200  # changes nothing


async def test_page_of_another_site_may_order_with_a_key_that_it_was_given() -> None:
    elsewhere = {"origin": "https://console.example", "sec-fetch-site": "cross-site"}
    async with client(KEYED) as asked:
        assert await status(asked, "/pause", "operator", **elsewhere) == 200
        assert await status(asked, "/pause", "client-1", **elsewhere) == 401
        assert await status(asked, "/pause", authorization=basic("operator"), **elsewhere) == 401
        named = {"host": "fleet.example", "origin": "http://fleet.example", "sec-fetch-site": "same-origin"}
        assert await status(asked, "/pause", authorization=basic("operator"), **named) == 200


def counts(limited: Access, making: int, now: float = 0.0) -> tuple[int, Admission | None]:
    """The status of a request that makes so many completions, 200 if it may; and its admission."""
    admitted = limited.admit(scope(), now)
    if isinstance(admitted, Refusal):
        return admitted.status, None
    admitted.making = making
    refusal = admitted.count(now)
    if refusal is not None:
        admitted.made(making)
        admitted.end()
        return refusal.status, None
    return 200, admitted


def test_a_request_counts_for_all_that_it_makes_until_it_has_ended():
    limited = Access(KEYED, LimitsConfig(concurrent_per_key=8))
    six = counts(limited, 6)[1]
    assert six is not None
    assert counts(limited, 3) == (429, None), "six and three are more than eight"
    assert counts(limited, 9) == (400, None), "never"
    two = counts(limited, 2)[1]
    assert two is not None and counts(limited, 1) == (429, None)
    six.making = 0  # it has made them, and its answer is still being sent
    assert counts(limited, 1) == (429, None)
    six.end()
    six.end()
    again = counts(limited, 6)[1]
    assert again is not None and counts(limited, 1) == (429, None)
    for each, making in ((two, 2), (again, 6)):
        each.made(making)
        each.end()
    assert counts(limited, 8)[0] == 200


def test_what_a_request_makes_in_the_background_counts_until_it_is_made():
    limited = Access(KEYED, LimitsConfig(concurrent_per_key=2, per_minute_per_key=2))
    first, second = counts(limited, 1)[1], counts(limited, 1)[1]
    assert first is not None and second is not None
    first.end()  # its answer said that it goes on
    assert counts(limited, 1) == (429, None)
    assert isinstance(limited.admit(scope("/v1/responses/resp_1/cancel"), 0.0), Admission)
    assert isinstance(limited.admit(scope("/v1/responses/resp_1/cancel/x"), 0.0), Refusal)
    first.made(1)
    refused = limited.admit(scope(), 0.0)
    assert isinstance(refused, Refusal) and "per_minute_per_key" in refused.message, "the other one has room again"
    first.making = 1  # the next of its turns, which is the same completion
    assert first.count(0.0) is None
    first.made(1)
    second.end()
    second.made(1)
    for _ in range(3):  # nothing is given back twice
        first.end()
    assert counts(limited, 2, 60.0)[0] == 200 and counts(limited, 1, 120.0) == (429, None)


def test_a_minutes_allowance_is_of_completions():
    limited = Access(KEYED, LimitsConfig(per_minute_per_key=60))
    assert counts(limited, 61) == (400, None)  # it was one for the minute
    assert counts(limited, 50, 0.0)[0] == 200
    refused = limited.admit(scope(), 0.0)
    assert isinstance(refused, Admission)
    refused.making = 20
    refusal = refused.count(0.0)
    assert refusal is not None and refusal.status == 429 and refusal.retry_after_s == pytest.approx(11.0)
    assert counts(limited, 20, 12.0)[0] == 200
