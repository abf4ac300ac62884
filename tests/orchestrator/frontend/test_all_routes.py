"""Every route of vLLM's app and ours, with vLLM's development routes: which of them another site's page may use.

A route that a later vLLM adds is refused to such pages unless it is under a client's prefix; there it has to be listed
here first.
"""

import os
import re
from collections.abc import Iterator
from typing import Any
from unittest.mock import AsyncMock

import httpx
import pytest
from starlette.routing import BaseRoute, Mount, WebSocketRoute

pytest.importorskip("vllm")

from vllm.entrypoints.launchers.app import build_app

from orchestrator.config.access import LimitsConfig, SecurityConfig
from orchestrator.config.settings import parse_config
from orchestrator.frontend.access import OPEN, Access
from orchestrator.frontend.dashboard.routes import operator_routes
from orchestrator.frontend.edge import EdgeMiddleware
from orchestrator.frontend.models.app import build_vllm_config

pytestmark = pytest.mark.vllm

TASKS = ("generate", "embed", "classify", "score", "token_embed", "token_classify", "transcription", "realtime")
# They answer requests of clients, and end at most the client's own.
CLIENTS = frozenset(
    "/tokenize /detokenize /invocations /v1/systemone /v1/chat/completions /v1/chat/completions/batch /v1/responses "
    "/v1/responses/{response_id}/cancel /v1/completions /v1/messages /v1/messages/count_tokens /generative_scoring "
    "/v1/chat/completions/render /v1/messages/render /v1/completions/render /v1/responses/render "
    "/v1/chat/completions/derender /v1/completions/derender /inference/v1/generate /v1/audio/transcriptions "
    "/v1/audio/translations /classify /v1/embeddings /v2/embed /pooling /score /v1/score /rerank /v1/rerank /v2/rerank "
    "/v1/realtime".split()
)
KNOWN_ORDERS = {"/pause", "/abort_requests", "/reset_prefix_cache", "/collective_rpc", "/operator/scale"}
KNOWN_ORDERS |= {"/inference/v1/abort_requests", "/v1/load_lora_adapter", "/start_profile"}


@pytest.fixture(scope="module")
def app() -> Any:
    os.environ |= {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    profiler = {"profiler": "torch", "torch_profiler_dir": "/tmp"}
    engine = {"engine_args": {"profiler_config": profiler}}
    args, vllm_config = build_vllm_config(parse_config({"model": "demo", "engine": "sim", "workers": engine}))
    app = build_app(args, TASKS, vllm_config.model_config)
    app.include_router(operator_routes(AsyncMock()))
    return app


def changing(routes: list[BaseRoute]) -> Iterator[tuple[str, str]]:
    """(method, path) of every route that may change something. A mounted app handles any method."""
    for route in routes:
        path = getattr(route, "path", "")
        methods = {"POST"} if isinstance(route, Mount) else getattr(route, "methods", None) or set()
        for method in sorted(methods - {"GET", "HEAD", "OPTIONS"}):
            yield method, path


async def reached(app: Any, security: SecurityConfig, method: str, path: str, headers: dict[str, str]) -> int:
    """The status of a request; 200 if it got past the edge."""

    async def passed(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    edge = EdgeMiddleware(passed, 1000, Access(security, LimitsConfig()))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(edge), base_url="http://127.0.0.1:8000") as asked:
        return (await asked.request(method, re.sub(r"\{.*?\}", "x", path), headers=headers)).status_code


@pytest.mark.parametrize(
    "security", [SecurityConfig(), SecurityConfig(operator_key="k"), SecurityConfig(api_keys=["a"])]
)
async def test_page_of_another_site_changes_nothing_of_the_fleet(app: Any, security: SecurityConfig) -> None:
    routes = [*changing(app.routes)]
    assert {path for _, path in routes} >= KNOWN_ORDERS
    for method, path in routes:
        for said in ({"origin": "https://evil.example"}, {"sec-fetch-site": "cross-site"}):
            code = await reached(app, security, method, path, said)
            if path in CLIENTS:
                assert code == (401 if security.api_keys else 200), (method, path)
            else:
                assert path in OPEN or code in (401, 403), f"{method} {path}: a page of any site may call it"


def test_websockets_are_clients(app: Any) -> None:
    assert {route.path for route in app.routes if isinstance(route, WebSocketRoute)} <= CLIENTS
