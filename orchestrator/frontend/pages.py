"""The pages that show the fleet: `/ready`, `/fleet`, `/predictions`, and `/metrics` with the fleet's own figures.

Every frontend receives the same load reports, so whichever frontend answers shows the whole fleet, and the figures of
`FleetCollector` are never summed over frontends. Does not import vLLM.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Any

import msgspec
from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, SummaryMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from orchestrator.fleet.view import Fleet
from orchestrator.fleet.worker_view import WorkerView
from orchestrator.policy.predict.predictor import Predictor
from orchestrator.store.configuration import RolloutStatus
from orchestrator.store.operator.worker_status import WorkerStatus
from orchestrator.types import DesiredRatio, QueueDepth, Role


class FleetCollector(Collector):
    """Yields gauges and counters of the fleet at the time of the scrape."""

    def __init__(
        self,
        workers: Callable[[], Iterable[WorkerView]],
        depth: Callable[[], QueueDepth | None],
        desired: Callable[[], DesiredRatio | None],
    ) -> None:
        self._workers = workers
        self._depth = depth
        self._desired = desired

    def collect(self) -> Iterator[Metric]:
        depth = self._depth()
        reachable = GaugeMetricFamily("pd_queue_reachable", "1 while Redis answers")
        reachable.add_metric([], float(depth is not None))
        yield reachable
        if depth is not None:
            yield GaugeMetricFamily("pd_queue_requests", "Remote prefills waiting to be claimed", value=depth.requests)
            yield GaugeMetricFamily("pd_queue_tokens", "Uncached prompt tokens in them", value=depth.tokens)
            yield GaugeMetricFamily("pd_queue_claimed", "Remote prefills claimed and not yet done", value=depth.claimed)
        if (desired := self._desired()) is not None:
            wanted = GaugeMetricFamily("pd_desired_workers", "Workers that there should be, by role", labels=["role"])
            for role, count in ((Role.PREFILL, desired.now.prefill), (Role.DECODE, desired.now.decode)):
                wanted.add_metric([role.value], count)
            yield wanted
        blocks = GaugeMetricFamily("pd_worker_kv_blocks", "KV blocks, by worker and state", labels=["worker", "state"])
        running = GaugeMetricFamily("pd_worker_requests", "Requests, by worker and state", labels=["worker", "state"])
        up = GaugeMetricFamily("pd_worker_up", "1 for each known worker", labels=["worker", "role", "state"])
        corrupt = CounterMetricFamily(
            "pd_worker_corrupt_messages", "Messages that came to a worker and could not be read", labels=["worker"]
        )
        sent = CounterMetricFamily("pd_kv_transfer_bytes", "KV bytes pushed to decode workers", labels=["worker"])
        described = CounterMetricFamily(
            "pd_kv_transfer_descriptors", "NIXL descriptors of the WRITEs that pushed them", labels=["worker"]
        )
        bad = CounterMetricFamily(
            "pd_kv_bad_messages", "Notifications between engines that could not be understood", labels=["worker"]
        )
        withdrawing = GaugeMetricFamily(
            "pd_kv_withdrawing_blocks",
            "KV blocks of transfers that were given up, kept until no WRITE can land in them",
            labels=["worker"],
        )
        failed = CounterMetricFamily("pd_kv_transfer_failures", "KV transfers that failed", labels=["worker"])
        took = SummaryMetricFamily("pd_kv_transfer_seconds", "Time of KV transfers", labels=["worker"])
        fetches = CounterMetricFamily(
            "pd_kv_fetches", "Prefixes asked for from other workers' caches, by outcome", labels=["worker", "outcome"]
        )
        fetched = CounterMetricFamily(
            "pd_kv_fetched_tokens", "Prompt tokens fetched from other workers' caches", labels=["worker"]
        )
        mean = CounterMetricFamily(
            "pd_group_mean_tokens", "Mean tokens of the ranks in a step, summed over steps", labels=["group"]
        )
        most = CounterMetricFamily(
            "pd_group_most_tokens", "Tokens of the rank with most in a step, summed over steps", labels=["group"]
        )
        lost = CounterMetricFamily(
            "pd_group_lost_seconds", "Time of steps that ranks waited for the one with most tokens", labels=["group"]
        )
        dummies = CounterMetricFamily("pd_group_dummy_steps", "Empty batches of ranks, in all", labels=["group"])
        waves = CounterMetricFamily("pd_group_waves", "Times that the ranks began to step", labels=["group"])
        host_hits = CounterMetricFamily(
            "pd_kv_host_hit_tokens", "Prompt tokens loaded from the worker's host tier", labels=["worker"]
        )
        host_blocks = GaugeMetricFamily("pd_kv_host_blocks", "KV blocks in the worker's host tier", labels=["worker"])
        for view in self._workers():
            name = view.info.id
            up.add_metric([name, view.info.role.value, view.info.state.value], 1)
            if (load := view.load) is None:
                continue
            blocks.add_metric([name, "free"], load.blocks_free)
            blocks.add_metric([name, "used"], load.blocks_total - load.blocks_free)
            running.add_metric([name, "running"], load.running)
            running.add_metric([name, "waiting"], load.waiting)
            corrupt.add_metric([name], load.corrupt_messages)
            sent.add_metric([name], load.kv.bytes_sent)
            described.add_metric([name], load.kv.descriptors)
            bad.add_metric([name], load.kv.bad_messages)
            withdrawing.add_metric([name], load.kv.withdrawing_blocks)
            failed.add_metric([name], load.kv.failures)
            took.add_metric([name], count_value=load.kv.transfers, sum_value=load.kv.transfer_s)
            for outcome, count in load.fetches.items():
                fetches.add_metric([name, outcome], count)
            fetched.add_metric([name], load.fetched_tokens)
            if (group := load.group) is not None:
                mean.add_metric([name], group.mean_tokens)
                most.add_metric([name], group.most_tokens)
                lost.add_metric([name], group.lost_s)
                dummies.add_metric([name], group.dummies)
                waves.add_metric([name], group.waves)
            host_hits.add_metric([name], load.kv.host_hit_tokens)
            host_blocks.add_metric([name], load.kv.host_blocks)
        yield from (up, blocks, running, corrupt, sent, described, took, failed, bad, withdrawing, fetches, fetched)
        yield from (mean, most, lost, dummies, waves, host_hits, host_blocks)


def fleet_routes(
    model: str,
    fleet: Fleet,
    depth: Callable[[], QueueDepth | None],
    desired: Callable[[], DesiredRatio | None],
    rollout: Callable[[], Awaitable[RolloutStatus | None]],
    registry: CollectorRegistry,
    predictor: Predictor,
    in_time: Callable[[], dict[str, float]],
    away: Callable[[], bool] = lambda: False,
) -> APIRouter:
    """`/ready`, `/fleet`, `/predictions` and `/metrics`. `away`: whether a request would bring the workers back."""
    routes = APIRouter()

    @routes.get("/ready")
    async def ready() -> Response:
        """200 once at least one worker can decode, or will when it is asked for."""
        if fleet.ready(Role.DECODE):
            return JSONResponse({"status": "ready"})
        if away():
            return JSONResponse({"status": "idle"})
        return JSONResponse(
            {"status": "not ready", "why": "no decode worker is ready"}, status_code=503, headers={"retry-after": "1"}
        )

    @routes.get("/fleet")
    async def show_fleet() -> dict[str, Any]:
        queue, wanted = depth(), desired()
        workers = sorted(fleet.workers.values(), key=lambda view: (view.info.role.value, view.info.id))
        return {
            "model": model,
            "workers": msgspec.to_builtins([WorkerStatus.of(view.info, view.load, view.connected) for view in workers]),
            "queue": msgspec.to_builtins(queue),
            "desired": msgspec.to_builtins(wanted),
            "in_time": in_time(),
            "rollout": msgspec.to_builtins(await rollout()),
        }

    @routes.get("/predictions")
    async def show_predictions() -> dict[str, Any]:
        """The coefficients of the predicted times, in seconds, as fitted so far."""
        shown: dict[str, Any] = msgspec.to_builtins(predictor.coefficients(), str_keys=True)
        return shown

    @routes.get("/metrics")
    async def show_metrics() -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    return routes
