"""Metrics whose folder was removed before their first value came, or lies on a full disk."""

import os
import resource
import shlex
import subprocess
import sys

import pytest
from prometheus_client import values
from prometheus_client.mmap_dict import MmapedDict
from support_container import can_contain
from support_wait import DEADLINE_S

from orchestrator.process.telemetry import metrics


@pytest.mark.parametrize("outlives", [True, False])
def test_metric_survives_removed_folder(tmp_path, monkeypatch, outlives):
    folder = tmp_path / "run" / "metrics-1"
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(folder))
    monkeypatch.setattr(values, "MmapedDict", MmapedDict)  # whatever tests before this one have left
    value_class = values.MultiProcessValue(lambda: "7")
    if not outlives:
        with pytest.raises(FileNotFoundError):
            value_class("summary", "m", "m", (), (), "")
        return
    metrics.keep_counting()
    value_class("summary", "m", "m", (), (), "").inc(2)
    assert [path.name for path in folder.iterdir()] == ["summary_7.db"]
    assert value_class("summary", "m", "m", (), (), "").get() == 2


_BEGIN = """
import errno, os
from orchestrator.process.telemetry.metrics import Metrics, counts, join_ended, keep_counting
keep_counting()
join_ended()
"""
_FILL = """
try:
    with open("fills", "wb", buffering=0) as fills:
        while True:
            fills.write(bytes(1024))
except OSError as error:
    assert error.errno == errno.ENOSPC
"""
_COUNT = """
metrics = Metrics()
for number in range({}):
    metrics.retries.labels(f"{{number}}").inc()
told = counts(metrics.retries, "why").total()
"""
_SCRAPE = """
from prometheus_client.multiprocess import MultiProcessCollector  # as any frontend of this host does
MultiProcessCollector(None, os.environ["PROMETHEUS_MULTIPROC_DIR"]).collect()
"""


@pytest.mark.skipif(not can_contain(), reason="needs a file system of its own")
@pytest.mark.parametrize(("before", "told"), [("", 2000), (_COUNT.format(10), 2010)], ids=["from the start", "later"])
def test_a_full_disk_ends_no_frontend(tmp_path, before, told):
    """A file that is mapped before it has room would end it by SIGBUS."""
    code = f"{_BEGIN}{before}{_FILL}{_COUNT.format(2000)}{_SCRAPE}print(told)"
    mounted = f"mount -t tmpfs -o size=512k none {tmp_path}; cd {tmp_path}"
    command = ["unshare", "--mount", "sh", "-c", f"{mounted}; exec {shlex.join([sys.executable, '-c', code])}"]
    env = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": f"{tmp_path}/metrics"}
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=DEADLINE_S)
    assert (ended.returncode, ended.stdout) == (0, f"{told}\n"), ended.stderr


@pytest.mark.parametrize("before", [0, 1], ids=["from the start", "later"])
def test_counting_needs_no_descriptors(tmp_path, monkeypatch, before):
    """It would fail requests when too many files are open."""
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    monkeypatch.setattr(values, "MmapedDict", MmapedDict)
    metrics.keep_counting()
    value_class = values.MultiProcessValue(lambda: "7")
    counted = [value_class("counter", "m", "m", ("n",), (str(number),), "") for number in range(before)]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        counted += [value_class("counter", "m", "m", ("n",), (str(number),), "") for number in range(before, 2000)]
        for value in counted:
            value.inc(2)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert sum(value.get() for value in counted) == 4000
