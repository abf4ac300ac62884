"""The pages that show the fleet: `/ready`, `/fleet`, `/predictions`, and `/metrics` with the fleet's own figures.

Every frontend receives the same load reports, so whichever frontend answers shows the whole fleet, and the figures of
`FleetCollector` are never summed over frontends. Does not import vLLM.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from operator import attrgetter
from typing import Any

import msgspec
from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, SummaryMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from orchestrator.fleet.queue_view import QueueView
from orchestrator.fleet.view import Fleet
from orchestrator.fleet.worker_view import WorkerView
from orchestrator.frontend.dashboard.history import overview
from orchestrator.frontend.wiring import FleetConnection
from orchestrator.process.tasks import in_thread
from orchestrator.process.telemetry.metrics import shown
from orchestrator.types import Role, WorkerLoad

# Numbers that load reports carry, in a `WorkerLoad` and its `StepCounters`: the name of each, its place, its meaning.
_COUNTED_BY_WORKERS = (
    ("pd_worker_corrupt_messages", "corrupt_messages", "Messages that came to a worker and could not be read"),
    ("pd_kv_transfer_bytes", "kv.bytes_sent", "KV bytes pushed to decode workers"),
    ("pd_kv_transfer_descriptors", "kv.descriptors", "NIXL descriptors of the WRITEs that pushed them"),
    ("pd_kv_transfer_failures", "kv.failures", "KV transfers that failed"),
    ("pd_kv_bad_messages", "kv.bad_messages", "Notifications between engines that could not be understood"),
    ("pd_kv_fetched_tokens", "fetched_tokens", "Prompt tokens fetched from other workers' caches"),
    ("pd_kv_host_hit_tokens", "kv.host_hit_tokens", "Prompt tokens loaded from the worker's host tier"),
)
_OF_WORKERS_NOW = (
    (
        "pd_kv_withdrawing_blocks",
        "kv.withdrawing_blocks",
        "KV blocks of transfers given up, until no WRITE can land",
    ),
    ("pd_kv_host_blocks", "kv.host_blocks", "KV blocks in the worker's host tier"),
)
_COUNTED_BY_GROUPS = (
    ("pd_group_mean_tokens", "mean_tokens", "Mean tokens of the ranks in a step, summed over steps"),
    ("pd_group_most_tokens", "most_tokens", "Tokens of the rank with most in a step, summed over steps"),
    ("pd_group_lost_seconds", "lost_s", "Time of steps that ranks waited for the one with most tokens"),
    ("pd_group_dummy_steps", "dummies", "Empty batches of ranks, in all"),
    ("pd_group_waves", "waves", "Times that the ranks began to step"),
)


class FleetCollector(Collector):
    """Yields gauges and counters of the fleet at the time of the scrape."""

    def __init__(self, fleet: Fleet, queue: QueueView) -> None:
        self._fleet, self._queue = fleet, queue

    def collect(self) -> Iterator[Metric]:
        yield from self._of_the_fleet()
        views = list(self._fleet.workers.values())
        loads = {view.info.id: view.load for view in views if view.load is not None}
        yield from _of_workers(views, loads)
        yield from _read(CounterMetricFamily, _COUNTED_BY_WORKERS, "worker", loads)
        yield from _read(GaugeMetricFamily, _OF_WORKERS_NOW, "worker", loads)
        groups = {name: load.group for name, load in loads.items() if load.group}
        yield from _read(CounterMetricFamily, _COUNTED_BY_GROUPS, "group", groups)

    def _of_the_fleet(self) -> Iterator[Metric]:
        depth = self._queue.depth
        reachable = GaugeMetricFamily("pd_queue_reachable", "1 while Redis answers")
        reachable.add_metric([], float(depth is not None))
        yield reachable
        if depth is not None:
            yield GaugeMetricFamily("pd_queue_requests", "Remote prefills waiting to be claimed", value=depth.requests)
            yield GaugeMetricFamily("pd_queue_tokens", "Uncached prompt tokens in them", value=depth.tokens)
            yield GaugeMetricFamily("pd_queue_claimed", "Remote prefills claimed and not yet done", value=depth.claimed)
        if (desired := self._fleet.desired) is not None:
            wanted = GaugeMetricFamily("pd_desired_workers", "Workers that there should be, by role", labels=["role"])
            for role, count in ((Role.PREFILL, desired.now.prefill), (Role.DECODE, desired.now.decode)):
                wanted.add_metric([role.value], count)
            yield wanted


def _of_workers(views: Iterable[WorkerView], loads: Mapping[str, WorkerLoad]) -> Iterator[Metric]:
    """What has more labels than the worker, or is not one number."""
    up = GaugeMetricFamily("pd_worker_up", "1 for each known worker", labels=["worker", "role", "state"])
    blocks = GaugeMetricFamily("pd_worker_kv_blocks", "KV blocks, by worker and state", labels=["worker", "state"])
    running = GaugeMetricFamily("pd_worker_requests", "Requests, by worker and state", labels=["worker", "state"])
    took = SummaryMetricFamily("pd_kv_transfer_seconds", "Time of KV transfers", labels=["worker"])
    fetches = CounterMetricFamily(
        "pd_kv_fetches", "Prefixes asked for from other workers' caches, by outcome", labels=["worker", "outcome"]
    )
    for view in views:
        up.add_metric([view.info.id, view.info.role.value, view.info.state.value], 1)
    for name, load in loads.items():
        blocks.add_metric([name, "free"], load.blocks_free)
        blocks.add_metric([name, "used"], load.blocks_total - load.blocks_free)
        running.add_metric([name, "running"], load.running)
        running.add_metric([name, "waiting"], load.waiting)
        took.add_metric([name], count_value=load.kv.transfers, sum_value=load.kv.transfer_s)
        for outcome, count in load.fetches.items():
            fetches.add_metric([name, outcome], count)
    yield from (up, blocks, running, took, fetches)


def _read(
    family: type[CounterMetricFamily] | type[GaugeMetricFamily],
    figures: Iterable[tuple[str, str, str]],
    label: str,
    told: Mapping[str, Any],
) -> Iterator[Metric]:
    """`told`: what has the figures, by the value of the label."""
    for name, place, meaning in figures:
        made, value_of = family(name, meaning, labels=[label]), attrgetter(place)
        for told_by, it in told.items():
            made.add_metric([told_by], value_of(it))
        yield made


def fleet_routes(model: str, connection: FleetConnection, registry: CollectorRegistry) -> APIRouter:
    """`/ready`, `/fleet`, `/predictions` and `/metrics`. `registry`: what the last one shows."""
    routes = APIRouter()
    fleet = connection.fleet

    @routes.get("/ready")
    async def ready() -> Response:
        """200 once at least one worker can decode, or will when it is asked for."""
        if fleet.ready(Role.DECODE):
            return JSONResponse({"status": "ready"})
        if connection.rest.away:  # a request would bring the workers back
            return JSONResponse({"status": "idle"})
        return JSONResponse(
            {"status": "not ready", "why": "no decode worker is ready"}, status_code=503, headers={"retry-after": "1"}
        )

    @routes.get("/fleet")
    async def show_fleet() -> dict[str, Any]:
        told = {"in_time": connection.history.in_time(), "rollout": await connection.rollout()}
        return overview(model, fleet, connection.queue) | told

    @routes.get("/predictions")
    async def show_predictions() -> dict[str, Any]:
        """The coefficients of the predicted times, in seconds, as fitted so far."""
        shown: dict[str, Any] = msgspec.to_builtins(connection.router.learning.predictor.coefficients(), str_keys=True)
        return shown

    @routes.get("/metrics")
    async def show_metrics() -> Response:
        # In a thread: meanwhile no token would be sent.
        return Response(await in_thread(partial(shown, registry)), media_type=CONTENT_TYPE_LATEST)

    return routes
