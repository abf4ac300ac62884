"""Spans of a request at a collector: OTLP over gRPC, taken by a real server of that protocol."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import httpx
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from support_fleet import RunningFleet, running_fleet, token_prompt

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

WITHIN_S = 60.0
TRACE, CLIENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


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
    sets = (f"frontend.otlp_endpoint={collector.endpoint}", "routing.remote_prefill_min_tokens=100")
    sets = (*sets, "sim.max_num_batched_tokens=200")  # so that prompts are prefilled in chunks
    with running_fleet("sim-2p2d.yaml", *sets, "frontend.trace_share=0") as running:
        yield running


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
