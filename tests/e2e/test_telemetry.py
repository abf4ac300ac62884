"""What a fleet tells others. A real Prometheus scrapes it, reads the rules of `deploy/`, and answers every query of the
Grafana dashboard; a real OTLP server takes the spans of its requests."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import yaml
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from support_fleet import RunningFleet, running_fleet, token_prompt
from support_servers import free_port
from support_tools import program

from benchmarks.peers.processes import running

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

DEPLOY = Path(__file__).parents[2] / "deploy"
WITHIN_S = 60.0
TRACE, CLIENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
NAME = re.compile(r"\b(?:pd_|vllm:)\w+")


def dashboard_queries() -> list[str]:
    panels = json.loads((DEPLOY / "grafana-dashboard.json").read_text())["panels"]
    found = [target["expr"] for panel in panels for target in panel["targets"]]
    return [query.replace("$__rate_interval", "30s").replace("$job", ".*") for query in found]


def rule_queries() -> list[str]:
    groups = yaml.safe_load((DEPLOY / "prometheus-rules.yaml").read_text())["groups"]
    return [rule["expr"] for group in groups for rule in group["rules"]]


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps every span that is exported to it."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self._server = grpc.server(ThreadPoolExecutor(2))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        self.endpoint = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def Export(self, request: Any, context: Any) -> Any:
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                self.spans += scope.spans
        return trace_service_pb2.ExportTraceServiceResponse()

    def of_trace(self, trace_id: str, count: int) -> dict[str, Any]:
        """By name, once there are so many."""
        deadline = time.monotonic() + WITHIN_S
        while time.monotonic() < deadline:
            found = {span.name: span for span in self.spans if span.trace_id.hex() == trace_id}
            if len(found) >= count:
                return found
            time.sleep(0.1)
        raise AssertionError(f"not {count} spans within {WITHIN_S:g} s: {[span.name for span in self.spans]}")

    def close(self) -> None:
        self._server.stop(None)


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


@pytest.fixture(scope="module")
def fleet(collector: Collector) -> Iterator[RunningFleet]:
    """It has been asked for short prompts and long ones, which no client traced."""
    sets = (f"frontend.otlp_endpoint={collector.endpoint}", "routing.remote_prefill_min_tokens=100")
    sets = (*sets, "workers.engine_args.max_num_batched_tokens=200")  # so that prompts are prefilled in chunks
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_TRACES_SAMPLER_ARG", "0")
        with running_fleet("sim-2p2d.yaml", *sets) as running:
            prompts = [token_prompt(length, seed=length) for length in (20, 40, 500, 600)]
            asyncio.run(running.ask_all(prompts, concurrency=4))
            yield running


@pytest.fixture
def prometheus(fleet: RunningFleet, tmp_path: Path) -> Iterator[httpx.Client]:
    """The shipped configuration, but for the target and a shorter interval."""
    command = program("prometheus", "prometheus")
    config = yaml.safe_load((DEPLOY / "prometheus.yaml").read_text())
    config["global"]["scrape_interval"] = config["global"]["evaluation_interval"] = "1s"
    config["scrape_configs"][0]["static_configs"][0]["targets"] = [fleet.url.removeprefix("http://")]
    config["rule_files"] = [str(DEPLOY / "prometheus-rules.yaml")]
    (tmp_path / "prometheus.yaml").write_text(yaml.safe_dump(config))
    url = f"http://127.0.0.1:{(port := free_port())}/api/v1"
    options = [f"--config.file={tmp_path}/prometheus.yaml", f"--storage.tsdb.path={tmp_path}/data"]
    options += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"]
    with running(tmp_path / "logs") as processes, httpx.Client(base_url=url, timeout=30) as client:
        processes.start("prometheus", [command, *options])
        yield client


def until(client: httpx.Client, path: str, condition: Any) -> Any:
    deadline, said = time.monotonic() + WITHIN_S, None
    while time.monotonic() < deadline:
        try:
            said = client.get(path).json()
            if condition(said):
                return said
        except (httpx.HTTPError, ValueError) as error:
            said = error
        time.sleep(0.3)
    raise AssertionError(f"{path}: not within {WITHIN_S:g} s; last: {said}")


def ask(fleet: RunningFleet, **headers: str) -> httpx.Response:
    body = {"model": fleet.model, "prompt": token_prompt(500, seed=1), "max_tokens": 8}
    answer = fleet.http.post("/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer


def test_a_clients_trace_goes_on_through_every_stage(fleet: RunningFleet, collector: Collector):
    answer = ask(fleet, traceparent=f"00-{TRACE}-{CLIENT}-01")
    spans = collector.of_trace(TRACE, 9)
    request = spans["POST /v1/completions"]
    assert request.parent_span_id.hex() == CLIENT
    stages = [spans[name] for name in ("frontend", "place", "queue", "claim", "prefill", "transfer", "decode")]
    assert {span.parent_span_id for span in stages} == {request.span_id}
    for before, after in zip(stages, stages[1:], strict=False):
        assert before.start_time_unix_nano <= before.end_time_unix_nano <= after.start_time_unix_nano + 1000
    chunks = [span for span in collector.spans if span.trace_id.hex() == TRACE and span.name == "prefill chunk"]
    assert len(chunks) == 3 and {span.parent_span_id for span in chunks} == {spans["prefill"].span_id}
    ends = [chunk.end_time_unix_nano for chunk in chunks]
    assert ends == sorted(set(ends)) and ends[-1] == spans["prefill"].end_time_unix_nano
    claimers = {item.value.string_value for item in spans["claim"].attributes if item.key == "pd.worker"}
    told = {item.key: item.value.string_value for item in spans["prefill"].attributes}
    assert told["pd.request_id"] == answer.headers["x-request-id"] and claimers == {told["pd.worker"]}


def test_untraced_requests_are_sampled(fleet: RunningFleet, collector: Collector):
    before = len(collector.spans)
    ask(fleet)
    ask(fleet, traceparent=f"00-{TRACE[::-1]}-{CLIENT}-00")
    ask(fleet, traceparent=f"00-{'a' * 32}-{CLIENT}-01")
    collector.of_trace("a" * 32, 5)  # at least: what is cached now is prefilled where it decodes
    others = {span.trace_id.hex() for span in collector.spans[before:]} - {TRACE, "a" * 32}
    assert others == set(), "a share of 0 traces what clients ask for, and no more"


def test_every_name_that_is_used_exists_in_a_fleet(fleet: RunningFleet):
    shown = {
        name
        for line in fleet.http.get("/metrics").text.splitlines()
        if (name := re.match(r"(?:# TYPE )?((?:pd_|vllm:)\w+)", line)) and (name := name[1])
    }
    # A histogram without observations shows its family alone, a counter with labels none of its samples.
    families = shown | {name + suffix for name in shown for suffix in ("_bucket", "_sum", "_count", "_total")}
    used = {name for query in dashboard_queries() + rule_queries() for name in NAME.findall(query)}
    assert len(used) > 15 and sorted(used - families) == []


def test_alert_rules_are_valid(tmp_path: Path):
    done = subprocess.run(
        [program("promtool", "prometheus"), "check", "rules", str(DEPLOY / "prometheus-rules.yaml")],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(rule_queries())} rules found" in done.stdout


def test_a_prometheus_answers_every_query_and_no_alert_is_wrong(fleet: RunningFleet, prometheus: httpx.Client):
    until(prometheus, "/query?query=sum(pd_worker_up)", lambda said: said["data"]["result"])
    for query in dashboard_queries() + rule_queries():
        said = prometheus.get("/query", params={"query": query}).json()
        assert said["status"] == "success", (query, said)
    # Queries over what certainly is there have an answer.
    for query in dashboard_queries()[:3]:
        said = prometheus.get("/query", params={"query": query}).json()
        assert said["data"]["result"], query

    def evaluated(said: dict[str, Any]) -> bool:
        return all(rule["lastEvaluation"] > "0002" for rule in said["data"]["groups"][0]["rules"])

    rules = until(prometheus, "/rules", evaluated)["data"]["groups"][0]["rules"]
    assert {rule["name"]: rule["state"] for rule in rules if rule["state"] != "inactive"} == {}
    assert [rule["lastError"] for rule in rules if rule.get("lastError")] == []


def test_panels_are_drawn_from_what_the_fleet_told(fleet: RunningFleet, prometheus: httpx.Client, tmp_path: Path):
    """By `examples/grafana.py`, which asks what Grafana would."""
    until(prometheus, "/query?query=count_over_time(pd_worker_up[1m])>4", lambda said: said["data"]["result"])
    command = [sys.executable, str(DEPLOY.parent / "examples" / "grafana.py"), "--out", str(tmp_path / "shown")]
    command += ["--prometheus", str(prometheus.base_url).removesuffix("/api/v1/"), "--last", "60"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    shown = json.loads((tmp_path / "shown.json").read_text())
    panels = json.loads((DEPLOY / "grafana-dashboard.json").read_text())["panels"]
    assert list(shown) == [panel["title"] for panel in panels]
    assert shown["Workers"]["prefill ready"][-1][1] == shown["Workers"]["decode desired"][-1][1] == 2
    assert len(shown["KV blocks in use"]) == 4 and (tmp_path / "shown.png").read_bytes().startswith(b"\x89PNG")


def test_a_redis_that_dies_is_noticed(fleet: RunningFleet, prometheus: httpx.Client):
    """The alert's condition holds: its `for` would take half a minute more."""
    until(prometheus, "/query?query=pd_queue_reachable==1", lambda said: said["data"]["result"])
    query = next(query for query in rule_queries() if "pd_queue_reachable) == 0" in query and "or" not in query)
    pid = fleet.redis_pid()
    os.kill(pid, signal.SIGSTOP)
    try:
        path = str(httpx.URL("/query", params={"query": query}))
        until(prometheus, path, lambda said: said["data"]["result"])
    finally:
        os.kill(pid, signal.SIGCONT)
