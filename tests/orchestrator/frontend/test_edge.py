"""Request ids, Retry-After, and the pages about the fleet, over a real ASGI app."""

import asyncio
import json
from types import SimpleNamespace
from typing import Annotated

import httpx
import msgspec
import pytest
import uvicorn
from fastapi import Body, FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from prometheus_client import CollectorRegistry
from support_siblings import queue_of
from support_wait import until

from orchestrator.config.access import LimitsConfig, SecurityConfig
from orchestrator.fleet.view import Fleet
from orchestrator.frontend import edge, pages
from orchestrator.frontend.access import Access
from orchestrator.policy.predict.predictor import Predictor
from orchestrator.store.configuration import Phase, Rollout, Version
from orchestrator.store.planned import rollout_status
from orchestrator.types import (
    DesiredRatio,
    EngineIdentity,
    KVCounters,
    KVEndpoint,
    QueueDepth,
    Role,
    WorkerInfo,
    WorkerLoad,
    WorkerState,
)


@pytest.fixture
def fleet():
    identity = EngineIdentity("m", "float32", "auto", 16, 4096, "sim", "1", 1)
    fleet = Fleet("f")
    info = WorkerInfo(
        "d0", Role.DECODE, WorkerState.READY, "h", 42, "a", "b", identity, KVEndpoint("e", "h", 1), 100, 8, 64, 1
    )
    fleet.upsert(info, 0.0)
    kv = KVCounters(bytes_sent=1000, descriptors=30, transfers=2, transfer_s=0.5, bad_messages=1, withdrawing_blocks=7)
    kv = msgspec.structs.replace(kv, host_hit_tokens=640, host_blocks=20)
    load = WorkerLoad("d0", 1, 100, 60, 2, 1, 30, 5.0, kv=kv, corrupt_messages=4)
    fleet.take_load(load, 0.0)
    return fleet


@pytest.fixture
def app(fleet):
    app = FastAPI()
    registry = CollectorRegistry()
    fleet.desired, queue = DesiredRatio(1, 2, "ratio", 5.0), queue_of(QueueDepth(3, 4000, 1))
    registry.register(pages.FleetCollector(fleet, queue))

    async def rollout():
        back = Rollout(Version(0, {}), Version(1, {}), phase=Phase.BACK, why="it cannot start")
        return rollout_status(back, {})

    connection = SimpleNamespace(
        fleet=fleet,
        queue=queue,
        rollout=rollout,
        rest=SimpleNamespace(away=False),
        history=SimpleNamespace(in_time=dict),
        router=SimpleNamespace(learning=SimpleNamespace(predictor=Predictor())),
    )
    ours = pages.fleet_routes("demo", connection, registry)
    app.router.routes[:0] = ours.routes

    @app.get("/refuse")
    async def refuse() -> Response:
        edge.current.get().refusal = edge.Refusal(429, "full; try again", 2.2)
        return Response(status_code=429)

    @app.get("/stream")
    async def stream(refused: bool) -> StreamingResponse:
        async def events():
            if refused:
                edge.current.get().refusal = edge.Refusal(429, "full; try again", 2.2)
            yield "data: one\n\n"
            yield "data: two\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    @app.get("/slow")
    async def slow() -> str:
        await asyncio.sleep(60)
        return "late"

    @app.get("/echo")
    async def echo() -> str:
        return edge.current.get().request_id

    @app.get("/objectives")
    async def objectives() -> list[float | str | None]:
        return list(edge.current.get().objectives)

    @app.post("/length")
    async def length(body: Annotated[bytes, Body()]) -> int:
        return len(body)

    @app.post("/read")
    async def read(request: Request) -> int:
        return len(await request.body())

    return edge.EdgeMiddleware(app, 1000, Access(SecurityConfig(), LimitsConfig()))


@pytest.fixture
async def client(app):
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        yield client


async def test_an_id_is_made_or_taken_and_always_returned(client):
    made = await client.get("/echo")
    assert len(made.headers["x-request-id"]) == 32 and made.json() == made.headers["x-request-id"]
    given = await client.get("/echo", headers={"x-request-id": "abc-1"})
    assert given.headers["x-request-id"] == "abc-1" and given.json() == "abc-1"
    long = await client.get("/echo", headers={"x-request-id": "x" * 5000})
    assert len(long.headers["x-request-id"]) == edge.MAX_REQUEST_ID_LENGTH
    assert edge.current.get() is None


async def test_a_proxy_is_told_to_pass_a_stream_on_as_it_comes(client):
    streamed = await client.get("/stream", params={"refused": False})
    assert streamed.headers.get_list("x-accel-buffering") == ["no"]
    for whole in (await client.get("/echo"), await client.get("/stream", params={"refused": True})):
        assert "x-accel-buffering" not in whole.headers


HALF = b'{"a": ["x\\ud800y"]}'


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (HALF, "\\ud800 at byte 9"),
        (b'{"\\uDFFF": 1}', "\\uDFFF at byte 2"),
        (b'"\\ude00\\ud83d"', "\\ude00 at byte 1"),  # the halves of a character, in the wrong order
        (b'"\\ud83d\\\\ude00"', "\\ud83d at byte 1"),  # the second is no escape
        (b'"\\\\\\ud83d"', "\\ud83d at byte 3"),
        (b'"\xed\xa0\x80"', "byte 1 is 0xed"),
        (b"\xff\xfe", "byte 0 is 0xff"),
        ('"\\ud800"'.encode("utf-16-le"), "byte 1 is 0"),
    ],
)
@pytest.mark.parametrize("pieces", [1, 2, 99])
async def test_text_that_is_no_unicode_is_refused_at_the_edge(client, body, why, pieces):
    async def chunks():
        step = -(-len(body) // pieces)
        for at in range(0, len(body), step):
            yield body[at : at + step]

    refused = await client.post("/length", content=chunks())
    assert refused.status_code == 400 and why in refused.json()["error"]["message"], refused.text


async def test_a_handler_that_reads_a_refused_body_raises_nothing(client):
    for body in (HALF, b"x" * 2000):

        async def chunks(body=body):
            yield body

        assert (await client.post("/read", content=chunks())).status_code in (400, 413)


async def test_every_character_of_unicode_comes_through(client):
    for text in ("\u20ac \U0001f600 \ud7ff \ue000 \U0010ffff \0 \\ud800 \\\\ude00", "\\u", "\\", "\\ud8"):
        for body in (json.dumps({"a": text}).encode(), json.dumps({"a": text}, ensure_ascii=False).encode()):
            assert (await client.post("/length", content=body)).json() == len(body)
    # A file is no text.
    for kind in ("multipart/mixed", "Multipart/Form-Data; boundary=x", "MULTIPART/form-data"):
        answered = await client.post("/length", content=HALF + b"\xff\0", headers={"content-type": kind})
        assert answered.json() == len(HALF) + 2


async def test_objectives_of_a_request_are_read_or_refused(client):
    taken = await client.get("/objectives", headers={"x-slo-ttft-ms": "300", "x-slo-class": "chat"})
    assert taken.json() == [0.3, None, "chat", ""]
    refused = await client.get("/objectives", headers={"x-slo-tpot-ms": "fast"})
    assert refused.status_code == 400 and "x-slo-tpot-ms: expected milliseconds" in refused.text


async def test_a_refusal_says_when_to_come_back(client):
    response = await client.get("/refuse")
    assert response.status_code == 429 and response.headers["retry-after"] == "3"
    assert "retry-after" not in (await client.get("/echo")).headers


async def test_a_stream_refused_before_its_first_event_is_a_refusal_not_a_200(client):
    refused = await client.get("/stream", params={"refused": True})
    assert refused.status_code == 429 and refused.headers["retry-after"] == "3"
    assert refused.json()["error"] == {
        "message": "full; try again", "type": "Too Many Requests", "param": None, "code": 429,
    }  # fmt: skip
    taken = await client.get("/stream", params={"refused": False})
    assert taken.status_code == 200 and taken.text == "data: one\n\ndata: two\n\n"
    assert taken.headers["x-request-id"] and "retry-after" not in taken.headers


async def test_ready_requires_decode_worker(client, fleet):
    assert (await client.get("/ready")).status_code == 503
    fleet.workers["d0"].note_connected(True)
    assert (await client.get("/ready")).status_code == 200


async def test_the_fleet_page_has_the_promised_fields(client, fleet):
    fleet.workers["d0"].note_connected(True)
    page = (await client.get("/fleet")).json()
    assert page["model"] == "demo" and page["queue"] == {"requests": 3, "tokens": 4000, "claimed": 1}
    assert page["desired"] == {"prefill": 1, "decode": 2, "set_by": "ratio", "set_at": 5.0, "why": ""}
    rolled = {"phase": "back", "old": 0, "new": 1, "why": "it cannot start", "restart": [], "to_restart": []}
    assert page["rollout"] == rolled
    assert page["workers"] == [
        {
            "id": "d0", "role": "decode", "state": "ready", "engine": "sim", "host": "h", "pid": 42,
            "blocks_total": 100, "blocks_free": 60, "running": 2, "waiting": 1, "step_ms": 5.0, "generation": 0,
            "unit": "d0", "rank": 0, "ranks": 1, "group": None,
            "labels": [], "block_size": 16, "max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 4096,
            "adapter_slots": 0, "kv_bytes_per_token": 1, "link_bytes_per_s": 0.0,
        }
    ]  # fmt: skip


async def test_predictions_show_the_fitted_coefficients(client):
    page = (await client.get("/predictions")).json()
    assert page["output_tokens"] > 0 and {"prefill_s", "local_s", "transfer_s", "wait_s", "itl_s"} <= page.keys()


async def test_metrics_have_the_promised_names(client):
    text = (await client.get("/metrics")).text
    for line in (
        "pd_queue_requests 3.0",
        "pd_queue_tokens 4000.0",
        'pd_desired_workers{role="decode"} 2.0',
        'pd_worker_kv_blocks{state="free",worker="d0"} 60.0',
        'pd_kv_transfer_bytes_total{worker="d0"} 1000.0',
        'pd_kv_transfer_descriptors_total{worker="d0"} 30.0',
        'pd_kv_bad_messages_total{worker="d0"} 1.0',
        'pd_kv_withdrawing_blocks{worker="d0"} 7.0',
        'pd_kv_host_hit_tokens_total{worker="d0"} 640.0',
        'pd_kv_host_blocks{worker="d0"} 20.0',
        'pd_worker_corrupt_messages_total{worker="d0"} 4.0',
        'pd_kv_transfer_seconds_sum{worker="d0"} 0.5',
        'pd_kv_transfer_seconds_count{worker="d0"} 2.0',
    ):
        assert line in text, line


async def parts(size: int, read: list[int]):
    for _ in range(size // 100):
        read.append(100)
        yield b"x" * 100


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_over_the_limit_is_answered_with_413_and_not_read_to_its_end(client, chunked):
    async def post(size, read):
        headers = {"x-request-id": "mine"} | ({} if chunked else {"content-length": str(size)})
        return await client.post("/length", content=parts(size, read), headers=headers)

    read: list[int] = []
    answered = await post(1000, read)
    assert (answered.status_code, answered.json()) == (200, 1000)
    read.clear()
    answered = await post(5000, read)
    assert answered.status_code == 413 and answered.headers["x-request-id"] == "mine"
    assert answered.json()["error"]["message"] == "the body is larger than 1000 bytes (limits.max_body_bytes)"
    assert len(read) == (11 if chunked else 0)
    assert "retry-after" not in answered.headers


async def test_requests_after_grace_get_503(app):
    config = uvicorn.Config(app, port=0, lifespan="off", log_config=None, timeout_graceful_shutdown=0)
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve())
    await until(lambda: server.started)
    [port] = [socket.getsockname()[1] for started in server.servers for socket in started.sockets]
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        asking = asyncio.create_task(client.get("/slow"))
        await until(lambda: server.server_state.tasks)
        server.should_exit = True
        answered = await asking
    await serving
    assert answered.status_code == 503 and answered.headers["retry-after"] == "1"
    assert answered.json()["error"]["message"] == "this frontend is ending: ask again"


async def test_stream_that_fails_before_its_first_event_is_a_500_that_says_why():
    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"Text/Event-Stream")]})
        try:
            raise ValueError("no such answer")
        except ValueError as error:
            raise RuntimeError("response already started") from error

    transport = httpx.ASGITransport(edge.EdgeMiddleware(app, 1000, Access(SecurityConfig(), LimitsConfig())))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as asked:
        answer = await asked.post("/v1/responses", headers={"x-request-id": "mine"})
    assert (answer.status_code, answer.headers["x-request-id"]) == (500, "mine")
    assert answer.json()["error"]["message"] == "the answer failed: ValueError: no such answer"


@pytest.mark.parametrize(("status", "answered"), [(500, 503), (400, 400)])
async def test_a_refusal_that_a_route_of_vllm_answers_as_a_failure_is_told(status, answered):
    """As /pause does with whatever is raised."""

    async def app(scope, receive, send):
        edge.current.get().refusal = edge.Refusal(503, "pause: worker w1: it does not answer", 1.0)
        await send({"type": "http.response.start", "status": status, "headers": [(b"content-length", b"4")]})
        await send({"type": "http.response.body", "body": b"what"})

    transport = httpx.ASGITransport(edge.EdgeMiddleware(app, 1000, Access(SecurityConfig(), LimitsConfig())))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as asked:
        answer = await asked.post("/pause")
    assert answer.status_code == answered and ("retry-after" in answer.headers) is (answered == 503)
    assert ("it does not answer" in answer.text) is (answered == 503)
