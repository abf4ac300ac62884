"""Two models behind one endpoint: simulated engines, two frontends, real processes and HTTP."""

import asyncio
import contextlib
import json
import math
import os
import signal
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support_client import LONG_STEPS, nobody_fails
from support_fleet import ROOT, token_prompt
from support_here import as_main, start_here
from support_many_models import Models
from support_servers import free_port
from support_wait import DEADLINE_S

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

CONFIG = "sim-two-models.yaml"
SETS = ("frontend.replicas=2", "workers.decode.replicas=2", "routing.remote_prefill_min_tokens=200", LONG_STEPS)
MODELS = ("small", "large")
PROMPTS = [token_prompt(20 + 173 * i % 1500, seed=i) for i in range(40)]


@pytest.fixture(scope="module")
def fleet() -> Iterator[Models]:
    with Models(CONFIG, *SETS) as running:
        yield running


def load_on_both(fleet: Models, concurrency: int = 6) -> contextlib.AbstractAsyncContextManager[None]:
    return nobody_fails([fleet.of(name) for name in MODELS], PROMPTS, concurrency, max_tokens=16)


def took_ms(fleet: Models, model: str, since: float, until: float = math.inf) -> list[float]:
    """Of the requests of a model that came in this time, unix seconds."""
    lines = [line for line in fleet.request_lines() if (line.get("decode_worker") or "").startswith(f"{model}-")]
    return [line["total_ms"] for line in lines if since <= line["arrived_at"] < until]


async def test_each_request_is_served_by_workers_of_its_model(fleet: Models) -> None:
    answered = {name: fleet.of(name).ask_all(PROMPTS * 2, concurrency=16) for name in MODELS}
    answers = dict(zip(answered, await asyncio.gather(*answered.values()), strict=True))
    for name, those in answers.items():
        assert [(a.status, a.error) for a in those if not a.ok] == []
        ended = fleet.at(name).until(
            lambda name=name: (
                fleet.at(name).metric("pd_requests_total", model_name=name, outcome="finished") >= len(PROMPTS) * 2
            ),
            "all are counted for their model",
        )
        assert ended
    for line in fleet.request_lines():
        served_by = {line["decode_worker"], line.get("prefill_worker")} - {None}
        assert len({worker.partition("-")[0] for worker in served_by}) == 1, line
    for name in MODELS:
        assert fleet.at(name).shape() == (1, 2)
        assert all(worker["id"].startswith(f"{name}-worker-") for worker in fleet.at(name).workers())
        fleet.at(name).assert_no_leaks()


def test_pages_and_names(fleet: Models) -> None:
    asked = fleet.http
    assert [card["id"] for card in asked.get("/v1/models").json()["data"]] == list(MODELS)
    body = {"prompt": "x", "max_tokens": 1}
    chat = {"messages": [{"role": "user", "content": "x"}]}
    for path, more in (("/v1/completions", body), ("/v1/chat/completions", chat)):
        unknown = asked.post(path, json={"model": "other", **more})
        assert unknown.status_code == 404 and unknown.json()["error"]["type"] == "NotFoundError"
        assert asked.post(path, json=more).status_code == 400
    for name in MODELS:
        assert asked.post(f"/models/{name}/v1/completions", json=body).json()["model"] == name
        assert asked.get(f"/models/{name}/dashboard").status_code == 200
    refused = asked.post("/v1/embeddings", json={"model": "small", "input": "x"})
    assert 400 <= refused.status_code < 500, "a model that generates makes no embeddings"
    metrics = asked.get("/metrics").text
    for family in ("pd_worker_up", "pd_requests_total", "vllm:request_success_total"):
        assert {name for name in MODELS if f'model_name="{name}"' in metrics} == set(MODELS), family
        assert metrics.count(f"# TYPE {family.removesuffix('_total')}") == 1, family


async def test_a_worker_that_is_killed_is_missed_by_no_model(fleet: Models) -> None:
    killed = fleet.at("small").workers("decode")[0]
    before = {worker["pid"] for worker in fleet.at("large").workers()}
    begun_at = time.time()
    async with load_on_both(fleet):
        await fleet.at("large").soon(lambda: len(took_ms(fleet, "large", begun_at)) > 50, "some are answered before")
        os.kill(killed["pid"], signal.SIGKILL)
        killed_at = time.time()
        await fleet.at("small").soon(
            lambda: (
                killed["pid"] not in {w["pid"] for w in fleet.at("small").workers()}
                and fleet.at("small").shape() == (1, 2)
            ),
            "another takes its place",
        )
    assert {worker["pid"] for worker in fleet.at("large").workers()} == before
    assert fleet.at("large").metric("pd_retries_total", model_name="large") == 0
    until_then = statistics.median(took_ms(fleet, "large", begun_at, killed_at))
    since = statistics.median(took_ms(fleet, "large", killed_at))
    print(
        f"the other model's latency: {until_then:.0f} ms before, {since:.0f} ms since, {since / until_then:.2f} times"
    )
    assert since < 3 * until_then, "the one that takes its place loads on the same two cores; nothing waits for it"
    for name in MODELS:
        fleet.at(name).assert_no_leaks()


async def test_models_are_scaled_each_by_itself(fleet: Models) -> None:
    async with load_on_both(fleet):
        await asyncio.to_thread(fleet.steer_one, "large", "scale", "decode=1")
        await fleet.at("large").soon(lambda: fleet.at("large").shape() == (1, 1), "one decode worker less")
    assert fleet.at("small").shape() == (1, 2)
    shown: dict[str, Any] = json.loads(fleet.cli("status", "--json").stdout)["models"]
    assert {name: seen["desired"]["decode"] for name, seen in shown.items()} == {"small": 2, "large": 1}
    done = fleet.cli("scale", "decode=3", check=False)
    assert done.returncode == 2 and "has several models (small, large); name one with --model" in done.stderr
    events = fleet.steer_one("large", "events").stdout
    assert "desired: 1 prefill, 1 decode, by scale" in events


async def test_a_model_is_rolled_out_by_itself_and_frontends_follow(fleet: Models) -> None:
    generations = [worker["generation"] for worker in fleet.at("large").workers()]
    config = str(ROOT / "configs" / CONFIG)
    sets = (
        f"namespace={fleet.namespace}",
        "ratio.mode=off",
        *SETS[1:],
        "models.small.workers.engine_args.num_gpu_blocks_override=2000",
    )
    async with load_on_both(fleet, concurrency=1):
        done = await asyncio.to_thread(
            fleet.steer_one, "small", "rollout", config, *(part for item in sets for part in ("--set", item))
        )
    assert "frontend" in done.stdout
    assert {worker["blocks_total"] for worker in fleet.at("small").workers()} == {2000}
    assert [worker["generation"] for worker in fleet.at("large").workers()] == generations
    for name in MODELS:
        fleet.at(name).assert_no_leaks()


def test_a_frontend_that_no_launcher_starts_serves_all_models(fleet: Models, tmp_path: Path) -> None:
    file, port = tmp_path / "fleet.yaml", free_port()
    file.write_text(f"namespace: {fleet.namespace}\n" + (ROOT / "configs" / CONFIG).read_text())
    arguments = ("--config", str(file), "--port", str(port), "--redis", fleet.redis_url())
    output = (tmp_path / "output").open("w")
    program = as_main("orchestrator.frontend.server", *arguments)
    frontend = start_here(program, output.fileno(), output.fileno())
    url = f"http://127.0.0.1:{port}"
    try:

        def serves() -> bool:
            assert frontend.is_alive(), (tmp_path / "output").read_text()
            with contextlib.suppress(httpx.HTTPError):
                return all(httpx.get(f"{url}/ready", timeout=10).json()["models"].values())
            return False

        fleet.at("small").until(serves, "it serves both", timeout_s=180)
        for name in MODELS:
            assert all(answer.ok for answer in asyncio.run(fleet.of(name, url).ask_all(PROMPTS[:8], concurrency=4)))
        shown = fleet.steer_one("large", "status", "--json", "--redis", fleet.redis_url()).stdout
        assert json.loads(shown)["model"] == "large"
    finally:
        frontend.terminate()
        frontend.join(DEADLINE_S)
        assert frontend.exitcode == 0, (tmp_path / "output").read_text()
        output.close()
