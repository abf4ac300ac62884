"""The `pd_*` counters and histograms of this frontend. Metrics that are read at scrape time are in `frontend.pages`."""

from __future__ import annotations

import collections

from prometheus_client import Counter, Gauge, Histogram

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)

placements = Counter("pd_placements", "Placement decisions, by decision and its reason", ["decision", "reason"])
requests = Counter("pd_requests", "Ended requests, by outcome", ["outcome"])
objectives = Counter(
    "pd_objectives",
    "Ended requests, by class (x-slo-class), objective (ttft, tpot), and whether it was met; a refused or failed one "
    "missed its ttft",
    ["slo_class", "objective", "met"],
)
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
# If frontends of one machine share their metrics, the value that was set last counts.
prefix_index_blocks = Gauge(
    "pd_prefix_index_blocks", "Distinct cached blocks that a frontend knows of", multiprocess_mode="mostrecent"
)
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


# These series exist from the start: Prometheus sees no increase in the first value of a new series.
for _outcome in ("finished", "aborted", "failed", "rejected"):
    requests.labels(_outcome)
for _why in ("stale", "corrupt", "error"):
    dropped.labels(_why)


def counts(counter: Counter, *labels: str) -> collections.Counter[str]:
    """A counter's values, by the values of these labels, joined by ": "."""
    found: collections.Counter[str] = collections.Counter()
    for sample in next(iter(counter.collect())).samples:
        if sample.name.endswith("_total"):
            found[": ".join(sample.labels[label] for label in labels)] += int(sample.value)
    return found
