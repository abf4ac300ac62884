"""`python -m benchmarks.gpu`: it says what a machine lacks, and runs from end to end where there is no GPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(920)]

ROOT = Path(__file__).parents[2]


def test_missing_requirements_are_listed_first(capsys: pytest.CaptureFixture[str]) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    from benchmarks import gpu

    assert gpu.main([]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("benchmarks.gpu: ")]
    assert "--device cpu" in lines[0] and any("CUDA" in line or "no GPU" in line for line in lines)


def test_every_part_runs_on_a_cpu(tmp_path: Path) -> None:
    arguments = ["--tokens", "64", "160", "--prompts", "6", "--variants", "chunk", "stock push, repaired"]
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", *arguments, "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    found = json.loads((tmp_path / "gpu-on-cpu.json").read_text())
    assert done.stdout.count("round 1 of 1 done (") == 1 + 2 + 2  # each variant of auto, kv and switches, as it ends
    assert found["equality"]["equal"] == found["equality"]["prompts"] == 6
    assert found["equality"]["verified"] > 0 and not found["equality"]["corrupt"] + found["equality"]["recomputed"]
    assert {row["variant"] for row in found["kv"]["rows"]} == {"chunk", "stock push, repaired"}
    assert {row["variant"] for row in found["auto"]["rows"]} == {"chunk"}
    assert {row["state"] for row in found["threads"]["rows"]} == {
        "at rest",
        "1 wait for KV",
        "16 wait for KV",
        "16 users",
    }
    assert all(row["ms_per_gb"] > 0 for row in found["threads"]["rows"] if row["state"] == "16 users")
    assert {row["variant"] for row in found["switches"]["rows"]} == {"auto"} and len(found["switches"]["rows"]) == 4
    for engines in ("one engine", "prefill and decode"):
        assert 0 < found["gaps"][engines]["p50_ms"] <= found["gaps"][engines]["p99_ms"]
        assert found["gaps"][engines]["long_prompts"] > 0
    assert (tmp_path / "gpu-on-cpu.png").stat().st_size > 10_000
    assert "## Gaps between tokens" in (tmp_path / "gpu-on-cpu.md").read_text()
