"""What several frontends of a machine tell together, one after the other too."""

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import GaugeMetricFamily
from support_wait import DEADLINE_S

from orchestrator.process.telemetry.metrics import Labelled, join_ended, shown

_TELL = """
from orchestrator.process.telemetry.metrics import Metrics
metrics = Metrics({model})
metrics.prefix_index_blocks.set({blocks})
metrics.requests.labels("finished").inc({ended})
"""
_JOIN = "from orchestrator.process.telemetry.metrics import join_ended; join_ended()"
_SCRAPE = """
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
registry = CollectorRegistry()
MultiProcessCollector(registry)
print(generate_latest(registry).decode())
"""


def run(code: str, folder: Path) -> str:
    env = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(folder)}
    return subprocess.run([sys.executable, "-c", code], env=env, check=True, capture_output=True, text=True).stdout


def test_a_frontend_that_has_ended_leaves_its_counts_and_no_gauge(tmp_path):
    for blocks, ended in ((7000, 3), (50, 2)):
        run(_TELL.format(model=None, blocks=blocks, ended=ended), tmp_path)
    lines = [line for line in run(_SCRAPE, tmp_path).splitlines() if not line.startswith("#")]
    assert [line for line in lines if line.startswith("pd_prefix_index_blocks")] == ["pd_prefix_index_blocks 50.0"]
    assert 'pd_requests_total{outcome="finished"} 5.0' in lines


def test_files_of_frontends_that_have_ended_are_made_one(tmp_path):
    """Each scrape reads all files: those of a fleet that has run for months would be thousands."""
    waited = "metrics.prefill_s.observe({ended})"
    running = subprocess.Popen(
        [sys.executable, "-c", _TELL.format(model=None, blocks=50, ended=4) + "print(flush=True); input()"],
        env={**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert running.stdout is not None and running.stdout.readline()
    for ended in (1, 2, 3):
        run((_TELL + waited).format(model=None, blocks=7000, ended=ended), tmp_path)
        run(_JOIN, tmp_path)
    kinds = sorted(path.stem.replace(str(running.pid), "RUNNING") for path in tmp_path.glob("*.db"))
    own = ["counter_RUNNING", "gauge_mostrecent_RUNNING", "histogram_RUNNING"]
    assert kinds == sorted([*own, "counter_0", "histogram_0"])
    lines = run(_SCRAPE, tmp_path).splitlines()
    running.communicate(b"\n", timeout=DEADLINE_S)
    assert 'pd_requests_total{outcome="finished"} 10.0' in lines and "pd_prefix_index_blocks 50.0" in lines
    assert "pd_prefill_seconds_sum 6.0" in lines and 'pd_prefill_seconds_bucket{le="+Inf"} 3.0' in lines


def test_a_scrape_does_not_wait_for_a_frontend_that_stands_still_while_it_joins(tmp_path, monkeypatch):
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    with (tmp_path / "ended.lock").open("w") as joining:
        fcntl.flock(joining, fcntl.LOCK_EX)
        assert shown(CollectorRegistry()) == b""


def test_nothing_is_joined_while_a_scrape_reads(tmp_path, monkeypatch):
    """It would count twice what has been joined already and is not removed yet, or find no file any more."""
    run(_TELL.format(model=None, blocks=50, ended=3), tmp_path)
    before = sorted(path.name for path in tmp_path.glob("*.db"))
    found = []

    class Reads:
        def collect(self):
            run(_JOIN, tmp_path)
            found.append(sorted(path.name for path in tmp_path.glob("*.db")))
            yield GaugeMetricFamily("read", "", value=1)

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Reads())
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    assert b"read 1.0" in shown(registry) and found == [before]
    run(_JOIN, tmp_path)
    assert [path.name for path in tmp_path.glob("counter_*.db")] == ["counter_0.db"]


def test_what_cannot_be_joined_for_want_of_room_is_kept(tmp_path, monkeypatch):
    run(_TELL.format(model=None, blocks=50, ended=3), tmp_path)
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    with monkeypatch.context() as full:
        full.setattr(os, "posix_fallocate", Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
        join_ended()
    assert 'pd_requests_total{outcome="finished"} 3.0' in run(_SCRAPE, tmp_path).splitlines()
    join_ended()
    assert [path.name for path in tmp_path.glob("counter_*.db")] == ["counter_0.db"]
    assert 'pd_requests_total{outcome="finished"} 3.0' in run(_SCRAPE, tmp_path).splitlines()


def test_a_file_that_cannot_be_read_ends_neither_a_frontend_nor_a_scrape(tmp_path):
    """Of one that was killed when it had just made it."""
    run(_TELL.format(model=None, blocks=50, ended=3), tmp_path)
    (own,) = tmp_path.glob("counter_*.db")
    dead = own.stem.rpartition("_")[2]
    (tmp_path / f"summary_{dead}.db").touch()
    run(_JOIN, tmp_path)
    assert not list(tmp_path.glob(f"*_{dead}.db"))
    assert 'pd_requests_total{outcome="finished"} 3.0' in run(_SCRAPE, tmp_path).splitlines()


def test_first_failure_counts_as_increase(tmp_path):
    """`rate` and `increase` of Prometheus see none in a figure that was not there before."""
    run("from orchestrator.process.telemetry.metrics import Metrics; Metrics()", tmp_path)
    told = run(_SCRAPE, tmp_path)
    for outcome in ("finished", "aborted", "failed", "invalid", "rejected"):
        assert f'pd_requests_total{{outcome="{outcome}"}} 0.0' in told
    assert 'pd_dropped_messages_total{why="corrupt"} 0.0' in told


def test_models_of_one_process_are_told_apart(tmp_path):
    code = """
from orchestrator.process.telemetry.metrics import Metrics, counts
for model, count in (("small", 1), ("large", 2)):
    of_model = Metrics(model)
    of_model.requests.labels("finished").inc(count)
    of_model.first_tokens_early.inc(count)
    of_model.prefill_s.observe(count)
    assert counts(of_model.requests, "outcome")["finished"] == counts(of_model.requests).total() == count
"""
    run(code, tmp_path)
    told = run(_SCRAPE, tmp_path)
    for model, count in (("small", "1.0"), ("large", "2.0")):
        assert f'pd_requests_total{{model_name="{model}",outcome="finished"}} {count}' in told
        assert f'pd_first_tokens_early_total{{model_name="{model}"}} {count}' in told
        assert f'pd_prefill_seconds_sum{{model_name="{model}"}} {count}' in told
    assert told.count("# TYPE pd_requests_total counter") == 1


def test_what_is_counted_again_is_not_looked_up_again(monkeypatch):
    for own in ((), ("small",)):
        labels = (*("model_name" for _ in own), "outcome")
        metric = Labelled(Counter("ended", "Requests", labels, registry=None), own)
        first = metric.labels("finished")
        other = metric.labels("failed")
        monkeypatch.setattr(metric.metric, "labels", None)
        assert metric.labels("finished") is first and metric.labels("failed") is other is not first
