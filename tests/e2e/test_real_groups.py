"""Data-parallel, expert-parallel groups of vLLM engines on a CPU, with a tiny model of random experts.

Two ranks hold half of the experts each and step together. Whatever the sizes of the groups that prefill and decode,
greedy tokens are those of one engine; a rank that dies ends its group, and no client notices. Slow:
`make test-topology` runs it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest
from support_fleet import DEMO_VOCABULARY, RunningFleet, running_fleet, token_prompt, with_demo_tokenizer
from support_models import special_model

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.topology, pytest.mark.timeout(900)]

MOE_ON_CPU = Path(__file__).parents[1] / "moe_on_cpu"
ENGINE = (
    "workers.engine_args.dtype=float32",
    "workers.engine_args.block_size=32",
    "workers.engine_args.max_model_len=2048",
    "workers.engine_args.kv_cache_memory_bytes=67108864",
    f"workers.env.PYTHONPATH={MOE_ON_CPU}",
    "workers.prefill.replicas=1",
    "workers.decode.replicas=1",
    "workers.profile=false",
    "workers.timeout_s=4",
    "routing.remote_prefill_min_tokens=64",
    "routing.prefix_index=false",
)
LENGTHS = [10, 33, 64, 100, 127, 128, 129, 200, 256, 300, 333, 480, 512, 700, 1000, 1500]
PROMPTS = [token_prompt(length, seed=i) for i, length in enumerate(LENGTHS)]
MAX_TOKENS = 16
IDLE_CORES = 0.02


def grouped(role: str, size: int) -> Sequence[str]:
    arguments = f"workers.{role}.engine_args"
    return [f"{arguments}.data_parallel_size={size}", f"{arguments}.enable_expert_parallel=true"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = special_model(tmp_path_factory.mktemp("model") / "experts", "experts", DEMO_VOCABULARY)
    return f"model={with_demo_tokenizer(folder)}"


@pytest.fixture(scope="module")
def truth(model: str) -> list[list[int]]:
    """The answers of one engine that has all experts."""
    with running_fleet("demo-1p1d-cpu.yaml", *ENGINE, model, "workers.prefill.replicas=0") as fleet:
        return whole(fleet)


def whole(fleet: RunningFleet) -> list[list[int]]:
    answers = asyncio.run(fleet.ask_all(PROMPTS, concurrency=8, max_tokens=MAX_TOKENS))
    assert [answer.error for answer in answers if not answer.ok] == []
    return [answer.tokens for answer in answers]


def engines(fleet: RunningFleet) -> list[psutil.Process]:
    """The processes of engine cores and coordinators."""
    agents = (psutil.Process(worker["pid"]) for worker in fleet.workers())
    return [child for agent in agents for child in agent.children()]


@pytest.mark.parametrize(("prefill", "decode"), [(2, 1), (2, 2)])
def test_greedy_tokens_are_those_of_one_engine(model: str, truth: list[list[int]], prefill: int, decode: int) -> None:
    sets = (*ENGINE, model, *grouped("prefill", prefill), *grouped("decode", decode))
    with running_fleet("demo-1p1d-cpu.yaml", *sets) as fleet:
        assert fleet.shape() == (prefill, decode)
        assert whole(fleet) == truth
        assert fleet.metric("pd_placements_total", decision="remote") > len(PROMPTS) // 2
        fleet.assert_no_leaks()


@pytest.fixture(scope="class")
def fleet(model: str) -> Iterator[RunningFleet]:
    with running_fleet("demo-1p1d-cpu.yaml", *ENGINE, model, *grouped("decode", 2)) as running:
        yield running


class TestDecodeGroup:
    def test_greedy_tokens_are_those_of_one_engine(self, fleet: RunningFleet, truth: list[list[int]]) -> None:
        assert fleet.shape() == (1, 2)
        assert whole(fleet) == truth
        assert fleet.metric("pd_placements_total", decision="remote") > len(PROMPTS) // 2
        fleet.assert_no_leaks()

    def test_idle_group_costs_nothing(self, fleet: RunningFleet) -> None:
        """A wave has ended when the last request has: no rank takes dummy steps."""
        fleet.assert_no_leaks()

        def cores() -> dict[int, float]:
            watched = engines(fleet)
            before = {process.pid: sum(process.cpu_times()[:2]) for process in watched}
            began = time.monotonic()
            time.sleep(5)  # a share of a core shows only over a time
            after = {process.pid: sum(process.cpu_times()[:2]) for process in watched}
            return {pid: (after[pid] - before[pid]) / (time.monotonic() - began) for pid in after}

        fleet.until(lambda: max(cores().values()) < 2 * IDLE_CORES, "engines that have no requests use no core")
