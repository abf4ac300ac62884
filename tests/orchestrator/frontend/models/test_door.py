"""Which app of several models gets a request, and what a request without a model is told. The apps are stand-ins."""

import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request, WebSocket
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import Gauge
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector, CollectorRegistry
from pydantic import BaseModel
from starlette.responses import JSONResponse, Response
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

pytest.importorskip("vllm")

from prometheus_client import generate_latest
from vllm.entrypoints.openai.models.protocol import BaseModelPath

from orchestrator.config.access import LimitsConfig, SecurityConfig
from orchestrator.frontend.access import Access
from orchestrator.frontend.edge import EdgeMiddleware
from orchestrator.frontend.models.door import ModelDoor, ModelPaths, model_asked_for
from orchestrator.frontend.models.metrics import ModelsCollector, OnlyModels

pytestmark = pytest.mark.vllm


class Card(BaseModel):
    id: str


class Cards(BaseModel):
    object: str = "list"
    data: list[Card]


class Models:
    def __init__(self, name: str, *adapters: str) -> None:
        self.name, self.lora_requests = name, dict.fromkeys(adapters)
        self.base_model_paths = [BaseModelPath(name, "/models/" + name)]

    async def show_available_models(self) -> Cards:
        return Cards(data=[Card(id=name) for name in (self.name, *self.lora_requests)])


def app_of(name: str, lives: list[str], *adapters: str) -> FastAPI:
    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        lives.append(f"{name} begins")
        yield
        lives.append(f"{name} ends")

    app = FastAPI(lifespan=lifespan)
    app.state.openai_serving_models = Models(name, *adapters)
    app.state.ready = True

    async def answer(request: Request) -> dict[str, Any]:
        return {"app": name, "path": request.url.path, "body": (await request.body()).decode()}

    async def ready() -> Any:
        return httpx.codes.OK if app.state.ready else _not_ready()

    def _not_ready() -> Any:
        return Response(status_code=503)

    async def unknown() -> JSONResponse:
        return JSONResponse({"error": f"It does not exist. Valid aliases: {name}."}, status_code=404)

    app.add_api_route("/ready", ready)
    app.add_api_route("/v1/chat/completions", unknown, methods=["POST"])
    for path in ("/v1/completions", "/fleet", "/operator/scale", "/pause", "/health", "/v1/audio"):
        app.add_api_route(path, answer, methods=["GET", "POST"])

    @app.websocket("/v1/realtime")
    async def realtime(socket: WebSocket) -> None:
        await socket.accept()
        await socket.send_text(name)
        await socket.close()

    return app


class Behind:
    def __init__(self, security: SecurityConfig = SecurityConfig(), root_path: str = "") -> None:
        self.lives: list[str] = []
        self.apps = {"a": app_of("org/a", self.lives, "lora"), "b": app_of("b", self.lives)}
        for app in self.apps.values():
            app.root_path = root_path
        edge = EdgeMiddleware(ModelDoor(self.apps, root_path), 1000, Access(security, LimitsConfig(), root_path))
        self.asgi = ModelPaths(edge, frozenset(self.apps), root_path)

    async def ask(self, method: str, path: str, **said: Any) -> httpx.Response:
        transport = httpx.ASGITransport(self.asgi)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return await client.request(method, path, **said)


@pytest.mark.parametrize(("model", "app"), [("org/a", "org/a"), ("b", "b"), ("lora", "org/a"), ("unknown", "org/a")])
async def test_a_request_goes_whole_to_the_app_of_its_model(model: str, app: str) -> None:
    answer = (await Behind().ask("POST", "/v1/completions", json={"prompt": "x" * 100, "model": model})).json()
    assert answer["app"] == app and answer["path"] == "/v1/completions"
    assert "x" * 100 in answer["body"]


async def test_an_unknown_model_is_told_the_names_of_all() -> None:
    for path, known in (("/v1/chat/completions", "org/a, b"), ("/models/a/v1/chat/completions", "org/a")):
        answer = await Behind().ask("POST", path, json={"model": "unknown"})
        assert answer.status_code == 404 and answer.json() == {"error": f"It does not exist. Valid aliases: {known}."}
    assert (await Behind().ask("POST", "/nowhere", json={"model": "unknown"})).json() == {"detail": "Not Found"}


async def test_a_model_goes_before_an_adapter_of_the_same_name() -> None:
    behind = Behind()
    behind.apps["a"].state.openai_serving_models.lora_requests["b"] = None
    assert (await behind.ask("POST", "/v1/completions", json={"model": "b"})).json()["app"] == "b"
    assert (await behind.ask("POST", "/models/a/v1/completions", json={"model": "b"})).json()["app"] == "org/a"


async def test_a_form_names_its_model() -> None:
    said = {"files": {"file": b"\0\1"}, "data": {"model": "b"}}
    assert (await Behind().ask("POST", "/v1/audio", **said)).json()["app"] == "b"


@pytest.mark.parametrize("root_path", ["", "/root"])
async def test_a_path_names_the_model_for_every_request(root_path: str) -> None:
    behind = Behind(root_path=root_path)
    for name, app in (("a", "org/a"), ("b", "b")):
        for method, path in (("GET", "/fleet"), ("POST", "/operator/scale"), ("POST", "/v1/completions")):
            answer = await behind.ask(method, f"{root_path}/models/{name}{path}", content=b"{}")
            assert answer.status_code == 200 and answer.json()["app"] == app, (method, path)
    assert (await behind.ask("GET", f"{root_path}/models/c/fleet")).status_code == 400


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize("path", ["/operator/scale", "/pause", "/v1/completions"])
async def test_what_names_no_model_is_told_how_to(method: str, path: str) -> None:
    for body in (b"", b"{}", b'{"model": null}', b'{"model": 3}', b"[", b'"b"'):
        answer = await Behind().ask(method, path, content=body)
        assert answer.status_code == 400
        said = answer.json()["error"]["message"]
        assert f"several models, org/a, b: name one as `model`, or ask /models/a{path}" in said


async def test_pages_show_all_models() -> None:
    behind = Behind()
    listed = (await behind.ask("GET", "/v1/models")).json()
    assert [card["id"] for card in listed["data"]] == ["org/a", "lora", "b"] and listed["object"] == "list"
    fleets = (await behind.ask("GET", "/fleet")).json()["models"]
    assert {name: said["app"] for name, said in fleets.items()} == {"a": "org/a", "b": "b"}
    assert 'href="models/b/dashboard"' in (await behind.ask("GET", "/dashboard")).text
    assert (await behind.ask("GET", "/health")).status_code == 200


async def test_ready_while_one_model_is() -> None:
    behind = Behind()
    for ready, status in (((True, True), 200), ((False, True), 200), ((False, False), 503)):
        for app, state in zip(behind.apps.values(), ready, strict=True):
            app.state.ready = state
        answer = await behind.ask("GET", "/ready")
        assert (answer.status_code, answer.json()["models"]) == (status, dict(zip("ab", ready, strict=True)))
        one = await behind.ask("GET", "/models/a/ready")
        assert one.status_code == (200 if ready[0] else 503)


async def test_a_path_of_a_model_needs_the_key_that_it_needs_without() -> None:
    behind = Behind(SecurityConfig(api_keys=["client"], operator_key="operator"))
    for path, keys in (
        ("/v1/completions", {"client", "operator"}),
        ("/fleet", {"operator"}),
        ("/health", {"", "client"}),
    ):
        for key in ("", "client"):
            answer = await behind.ask("GET", f"/models/b{path}", headers={"authorization": f"Bearer {key}"})
            assert answer.status_code == (200 if key in keys else 401), (path, key)
    assert (await behind.ask("GET", "/models/b/models/b/health")).status_code == 401, "only one part is taken off"


async def test_a_body_over_the_limit_reaches_no_app() -> None:
    answer = await Behind().ask("POST", "/v1/completions", json={"model": "b", "prompt": "x" * 2000})
    assert answer.status_code == 413


def test_apps_live_as_long_as_the_server_and_sockets_need_a_model() -> None:
    behind = Behind()
    with TestClient(behind.asgi, base_url="http://127.0.0.1") as client:
        assert behind.lives == ["org/a begins", "b begins"]
        with client.websocket_connect("/models/b/v1/realtime") as socket:
            assert socket.receive_text() == "b"
        with pytest.raises(WebSocketDisconnect) as refused, client.websocket_connect("/v1/realtime") as socket:
            socket.receive_text()
        assert refused.value.code == 1008 and "several models, org/a, b" in refused.value.reason
    assert behind.lives[2:] == ["b ends", "org/a ends"]


@given(st.binary(max_size=200), st.sampled_from([b"application/json", b"multipart/form-data; boundary=x", b""]))
def test_any_body_names_a_model_or_none(body: bytes, content_type: bytes) -> None:
    assert model_asked_for([(b"content-type", content_type)], body) is None or content_type


def test_the_time_to_look_through_a_form_grows_as_the_form_does() -> None:
    headers = [(b"content-type", b"multipart/form-data; boundary=x")]

    def took_s(hostile: bytes) -> float:
        began = time.perf_counter()
        assert model_asked_for(headers, hostile) is None
        return time.perf_counter() - began

    for line in (b"name=model\r\n", b"name=model", b"--x\r\nname=mode\r\n"):
        short_s = min(took_s(line * 1_000) for _ in range(3))
        assert took_s(line * 100_000) < 1_000 * (short_s + 1e-4), line


async def test_a_body_that_nests_too_deep_is_its_clients_fault() -> None:
    behind = Behind()
    behind.asgi.app._max_body_bytes = 1 << 20
    for body in (b'{"a":' * 100_000, b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b',"model":"b"}'):
        answer = await behind.ask("POST", "/v1/completions", content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 400


def test_a_file_that_is_called_model_names_none() -> None:
    form = (
        b'--x\r\nContent-Disposition: form-data; name="file"; filename="model"\r\n\r\nRIFF\r\n'
        b'--x\r\nContent-Disposition: form-data; name="more"; filename="a; name=model.wav"\r\n\r\nRIFF\r\n'
        b'--x\r\nContent-Disposition: form-data; name="model-size"\r\n\r\nlarge\r\n'
        b"--x\r\ncontent-disposition: form-data; name=model\r\ncontent-type: text/plain\r\n\r\nb\r\n--x--\r\n"
    )
    for kind in (b"multipart/form-data; boundary=x", b'Multipart/Form-Data; charset=utf-8; Boundary="x"'):
        assert model_asked_for([(b"content-type", kind)], form) == "b"
    assert model_asked_for([(b"content-type", b"multipart/form-data")], form) is None


class Of(Collector):
    def __init__(self, value: float) -> None:
        self._value = value

    def collect(self) -> list[Metric]:  # type: ignore[override]
        family = GaugeMetricFamily("pd_worker_up", "it is", labels=["worker"])
        family.add_metric(["worker-0"], self._value)
        return [family]


def test_a_family_has_the_samples_of_all_models() -> None:
    registry = CollectorRegistry()
    registry.register(ModelsCollector({"a": Of(1), "b": Of(2)}))
    Gauge("other", "stays", registry=registry)
    told = generate_latest(registry).decode()
    assert told.count("# TYPE pd_worker_up gauge") == 1
    for model, value in (("a", "1.0"), ("b", "2.0")):
        assert f'pd_worker_up{{model_name="{model}",worker="worker-0"}} {value}' in told


def test_what_a_removed_model_has_counted_is_not_shown() -> None:
    registry, shown = CollectorRegistry(), CollectorRegistry()
    registry.register(ModelsCollector({"a": Of(1), "gone": Of(2)}))
    Gauge("other", "has no model", registry=registry)
    shown.register(OnlyModels(registry, ["a", "org/a"]))
    told = generate_latest(shown).decode()
    assert 'model_name="gone"' in generate_latest(registry).decode()
    assert "gone" not in told and 'pd_worker_up{model_name="a",worker="worker-0"} 1.0' in told and "other 0.0" in told
