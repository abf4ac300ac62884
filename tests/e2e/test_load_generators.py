"""The field's load generators, unmodified, on a fleet: no request fails, and their time to first token is ours.

`vllm bench serve` comes with vLLM. The others run where their program is on the PATH: install each into an environment
of its own, since this project's has none of their packages.
"""

import json
import multiprocessing
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support_fleet import RunningFleet, running_fleet
from support_wait import DEADLINE_S

from orchestrator.config.model import resolve_model

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(300)]

REQUESTS, USERS, PROMPT_TOKENS, OUTPUT_TOKENS = 24, 2, 512, 8
AGREES_WITHIN = 0.1


def bench_serve(folder: Path, arguments: list[str]) -> None:
    """What `vllm bench serve` runs, in a process forked from this one, which need not import vLLM."""
    from vllm.benchmarks.serve import add_cli_args, main
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    os.chdir(folder)
    add_cli_args(parser := FlexibleArgumentParser())
    main(parser.parse_args(arguments))


@pytest.fixture(scope="module")
def fleet() -> Iterator[RunningFleet]:
    """A prompt takes half a second, so that what lies between the clocks of both sides is a small part of it."""
    sets = ("sim.prefill_us_per_token=1000", "routing.remote_prefill_min_tokens=100")
    with running_fleet("sim-2p2d.yaml", *sets) as running:
        yield running


class Counted:
    """What the fleet counted since this was made: requests, and their mean time to the first token."""

    def __init__(self, fleet: RunningFleet) -> None:
        self._fleet = fleet
        self._before = self._now()

    def _now(self) -> tuple[float, float]:
        name = "vllm:time_to_first_token_seconds"
        return self._fleet.metric(f"{name}_count"), self._fleet.metric(f"{name}_sum")

    @property
    def requests(self) -> int:
        return int(self._now()[0] - self._before[0])

    @property
    def ttft_ms(self) -> float:
        return 1e3 * (self._now()[1] - self._before[1]) / self.requests


def called(*command: str, folder: Path) -> None:
    # Offline, aiperf takes the folder of a tokenizer for the name of a repository.
    env = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=3 * DEADLINE_S)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def program(name: str) -> str:
    if (found := shutil.which(name)) is None:
        pytest.skip(f"{name} is not on the PATH: install it into an environment of its own (uv tool install {name})")
    return found


def test_vllm_bench_serve(fleet: RunningFleet, tmp_path: Path) -> None:
    counted = Counted(fleet)
    arguments = [
        "--backend", "openai", "--base-url", fleet.url, "--endpoint", "/v1/completions",
        "--model", fleet.model, "--tokenizer", resolve_model("demo"),
        "--dataset-name", "random", "--random-input-len", str(PROMPT_TOKENS),
        "--random-output-len", str(OUTPUT_TOKENS), "--ignore-eos",
        "--num-prompts", str(REQUESTS), "--max-concurrency", str(USERS),
        "--save-result", "--result-dir", str(tmp_path), "--result-filename", "found.json",
    ]  # fmt: skip
    client = multiprocessing.get_context("fork").Process(target=bench_serve, args=(tmp_path, arguments))
    client.start()
    client.join(3 * DEADLINE_S)
    client.kill()
    assert client.exitcode == 0
    found: dict[str, Any] = json.loads((tmp_path / "found.json").read_text())
    assert (found["completed"], found["failed"]) == (REQUESTS, 0)
    assert counted.requests >= REQUESTS
    assert found["mean_ttft_ms"] == pytest.approx(counted.ttft_ms, rel=AGREES_WITHIN)


def test_guidellm(fleet: RunningFleet, tmp_path: Path) -> None:
    guidellm, counted = program("guidellm"), Counted(fleet)
    called(
        guidellm, "run", "--disable-console",
        "--backend", f"kind=openai_http,target={fleet.url},model={fleet.model},request_format=/v1/completions",
        "--profile", f"kind=concurrent,streams={USERS}", "--constraint", f"kind=max_requests,count={REQUESTS}",
        "--data", f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={OUTPUT_TOKENS}",
        "--tokenizer", f"kind=hf_auto,model={resolve_model('demo')}", "--output", "kind=json,path=found.json",
        folder=tmp_path,
    )  # fmt: skip
    (found,) = json.loads((tmp_path / "found.json").read_text())["benchmarks"]
    totals, ttft_ms = found["metrics"]["request_totals"], found["metrics"]["time_to_first_token_ms"]
    assert (totals["successful"], totals["errored"], totals["incomplete"]) == (REQUESTS, 0, 0)
    assert counted.requests >= REQUESTS
    assert ttft_ms["successful"]["mean"] == pytest.approx(counted.ttft_ms, rel=AGREES_WITHIN)


def test_aiperf(fleet: RunningFleet, tmp_path: Path) -> None:
    aiperf, counted = program("aiperf"), Counted(fleet)
    called(
        aiperf, "profile", "--ui", "none", "--no-server-metrics", "--output-artifact-dir", "found",
        "--url", fleet.url, "--model", fleet.model, "--tokenizer", resolve_model("demo"),
        "--endpoint-type", "completions", "--streaming", "--extra-inputs", "ignore_eos:true",
        "--isl", str(PROMPT_TOKENS), "--osl", str(OUTPUT_TOKENS),
        "--request-count", str(REQUESTS), "--concurrency", str(USERS),
        folder=tmp_path,
    )  # fmt: skip
    found = json.loads((tmp_path / "found" / "profile_export_aiperf.json").read_text())
    assert found["request_count"]["avg"] == REQUESTS and not found["error_summary"]
    assert counted.requests >= REQUESTS
    assert found["time_to_first_token"]["avg"] == pytest.approx(counted.ttft_ms, rel=AGREES_WITHIN)
