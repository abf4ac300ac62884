"""The `pd_*` metrics: counters of this frontend, and the fleet's state read at scrape time.

Per-worker figures come from load reports that every frontend hears alike, so they are collected when scraped,
by whichever frontend answers, and are never added up over frontends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, SummaryMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from orchestrator.fleet import WorkerView
from orchestrator.types import DesiredRatio, QueueDepth, Role

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)

placements = Counter("pd_placements", "Placement decisions, by decision and its reason", ["decision", "reason"])
requests = Counter("pd_requests", "Ended requests, by outcome", ["outcome"])
retries = Counter("pd_retries", "Attempts given up and started again, by why", ["why"])
first_tokens_early = Counter("pd_first_tokens_early", "First tokens sent from prefill, before decode had the KV")
first_token_mismatches = Counter(
    "pd_first_token_mismatches", "First tokens sent from prefill that decode would have sampled otherwise"
)
prefix_hit_tokens = Counter(
    "pd_prefix_hit_tokens",
    "Prompt tokens that a prefix cache held: as believed at the worker chosen to prefill locally (local) or to receive "
    "KV (decode), as its engine said where prefilled remotely (prefill)",
    ["side"],
)
prefix_index_blocks = Gauge("pd_prefix_index_blocks", "Distinct cached blocks that this frontend knows of")
prefix_resyncs = Counter(
    "pd_prefix_resyncs", "Snapshots of a worker's prefix cache asked for: it is new, or events were lost"
)
dropped = Counter("pd_dropped_messages", "Messages dropped: of an older attempt, corrupt or unknown", ["why"])
queue_wait_s = Histogram("pd_queue_wait_seconds", "From enqueue to claim of a remote prefill", buckets=_SECONDS)
prefill_s = Histogram("pd_prefill_seconds", "From claim to the end of prefill compute", buckets=_SECONDS)
kv_exposed_s = Histogram(
    "pd_kv_exposed_seconds", "From the end of remote prefill compute to decode's first token", buckets=_SECONDS
)

ratio_changes = Counter("pd_ratio_changes", "Changes of the desired ratio decided by this frontend, while it led")


class FleetCollector(Collector):
    """Yields gauges and counters of the fleet as it is at the moment of the scrape."""

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
            for role in Role:
                wanted.add_metric([role.value], desired.prefill if role is Role.PREFILL else desired.decode)
            yield wanted
        blocks = GaugeMetricFamily("pd_worker_kv_blocks", "KV blocks, by worker and state", labels=["worker", "state"])
        running = GaugeMetricFamily("pd_worker_requests", "Requests, by worker and state", labels=["worker", "state"])
        up = GaugeMetricFamily("pd_worker_up", "1 for each known worker", labels=["worker", "role", "state"])
        sent = CounterMetricFamily("pd_kv_transfer_bytes", "KV bytes pushed to decode workers", labels=["worker"])
        described = CounterMetricFamily(
            "pd_kv_transfer_descriptors", "NIXL descriptors of the WRITEs that pushed them", labels=["worker"]
        )
        bad = CounterMetricFamily(
            "pd_kv_bad_messages", "Notifications between engines that could not be understood", labels=["worker"]
        )
        failed = CounterMetricFamily("pd_kv_transfer_failures", "KV transfers that failed", labels=["worker"])
        took = SummaryMetricFamily("pd_kv_transfer_seconds", "Time of KV transfers", labels=["worker"])
        for view in self._workers():
            name = view.info.id
            up.add_metric([name, view.info.role.value, view.info.state.value], 1)
            if (load := view.load) is None:
                continue
            blocks.add_metric([name, "free"], load.blocks_free)
            blocks.add_metric([name, "used"], load.blocks_total - load.blocks_free)
            running.add_metric([name, "running"], load.running)
            running.add_metric([name, "waiting"], load.waiting)
            sent.add_metric([name], load.kv.bytes_sent)
            described.add_metric([name], load.kv.descriptors)
            bad.add_metric([name], load.kv.bad_messages)
            failed.add_metric([name], load.kv.failures)
            took.add_metric([name], count_value=load.kv.transfers, sum_value=load.kv.transfer_s)
        yield from (up, blocks, running, sent, described, took, failed, bad)
