"""A metric whose first value comes after its folder was removed."""

import pytest
from prometheus_client import values
from prometheus_client.mmap_dict import MmapedDict

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
    metrics.recreate_missing_folder()
    value_class("summary", "m", "m", (), (), "").inc(2)
    assert [path.name for path in folder.iterdir()] == ["summary_7.db"]
    assert value_class("summary", "m", "m", (), (), "").get() == 2
