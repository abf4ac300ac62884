"""Fixes of vLLM's defects, without an engine."""

import functools
import gc
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support_here import run_here
from support_vllm import scheduler_of

from workers.vllm_engine.identity import vllm_schema

pytestmark = pytest.mark.vllm


def test_what_is_not_compiled_gives_the_same_log_probabilities_and_greedy_tokens() -> None:
    """By vLLM's own sampler, in its two ways: ranks and values are equal to the last bit."""
    import torch
    from vllm.v1.sample.sampler import Sampler

    from workers.vllm_engine.patches import patch_as_configured

    logits = torch.randn(5, 1000, generator=torch.Generator().manual_seed(3))
    model = types.SimpleNamespace(enforce_eager=True)
    eager = types.SimpleNamespace(model_config=model, use_v2_model_runner=False, lora_config=None)

    def sampled() -> list[torch.Tensor]:
        sampler = Sampler()
        tokens = sampler.greedy_sample(logits)
        logprobs = sampler.gather_logprobs(sampler.compute_logprobs(logits), 4, tokens)
        return [tokens, *(part for part in logprobs if part is not None)]

    was_compiled = sampled()
    with torch.compiler.set_stance("default"):  # given back afterwards
        patch_as_configured(eager)
        assert all(torch.equal(one, other) for one, other in zip(was_compiled, sampled(), strict=True))


@pytest.mark.parametrize("prefills", [True, False])
def test_only_tokens_with_an_adapter_get_its_weights(monkeypatch: pytest.MonkeyPatch, prefills: bool) -> None:
    """By vLLM's own kernels for CPUs, in both of their ways, in a step that has tokens of two adapters and of none."""
    import torch
    from vllm.lora.layers import LoRAMapping
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    from workers.vllm_engine import patches

    for module in (lora_ops, punica_cpu):
        for name in ("bgmv_expand", "bgmv_expand_slice"):
            monkeypatch.setattr(module, name, getattr(module, name))  # given back afterwards
    patches._add_adapters_where_wanted()
    wrapper = punica_cpu.PunicaWrapperCPU(8, 8, "cpu")
    wrapper.update_metadata(LoRAMapping((7, 7, 0, 9, 0), (7, 0, 9, 0), is_prefill=prefills), [7, 9], 2, 100)
    first, last = (tuple(torch.rand(2, 1, *size) for _ in range(2)) for size in ((4, 16), (8, 4)))  # of two slots
    x, linear, logits, embedded = torch.rand(5, 16), torch.zeros(5, 16), torch.zeros(4, 8), torch.zeros(5, 8)
    wrapper.add_lora_linear(linear, x, first, last, 1.0, (8, 8))
    wrapper.add_lora_logits(logits, x[:4], first[0], last[0], 1.0)
    wrapper.add_lora_embedding(embedded, x[:, :4].contiguous(), last[0])
    for rows, with_one in ((linear, [0, 1, 3]), (logits, [0, 2]), (embedded, [0, 1, 3])):
        assert rows.any(dim=1).nonzero().flatten().tolist() == with_one
    of_nine = [x[3] @ a[1, 0].T @ b[1, 0].T for a, b in zip(first, last, strict=True)]
    assert torch.allclose(linear[3], torch.cat(of_nine))


def scores() -> None:
    """In a step with prompts of two adapters, one of them in parts, and of none."""
    import torch
    from vllm.lora.layers import LoRAMapping
    from vllm.lora.punica_wrapper import punica_cpu
    from vllm.v1.sample.sampler import Sampler
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    from workers.vllm_engine.patches import patch_as_configured

    model = types.SimpleNamespace(enforce_eager=True, logprobs_mode="raw_logits")
    patch_as_configured(types.SimpleNamespace(model_config=model, use_v2_model_runner=False, lora_config=True))
    wrapper = punica_cpu.PunicaWrapperCPU(32, 8, "cpu")
    a, b, states = torch.rand(2, 1, 4, 16), torch.rand(2, 1, 50, 4), torch.rand(13, 16)

    def logits(rows: torch.Tensor) -> torch.Tensor:
        wrapper.add_lora_logits(made := torch.zeros(len(rows), 50), rows, a, b, 1.0)
        return made

    def request(length: int, computed: int) -> types.SimpleNamespace:
        some = {"prompt_token_ids": list(range(length)), "num_computed_tokens": computed}
        return types.SimpleNamespace(**some, in_progress_prompt_logprobs_cpu=None)

    runner: Any = types.SimpleNamespace(
        num_prompt_logprobs={"of nine": 1, "of none": 1, "part of seven": 1, "preempted": 1},
        requests={"of nine": request(6, 0), "of none": request(3, 0), "part of seven": request(40, 8)},
        input_batch=types.SimpleNamespace(req_id_to_index={"of nine": 0, "of none": 1, "part of seven": 2}),
        query_start_loc=types.SimpleNamespace(np=np.array([0, 6, 9, 13])),
        model=types.SimpleNamespace(compute_logits=logits),
        model_config=model,
        sampler=Sampler(),
        device="cpu",
        _sync_device=lambda: None,
    )
    wrapper.update_metadata(LoRAMapping((9,) * 6 + (0,) * 3 + (7,) * 4, (9, 0, 7), is_prefill=True), [7, 9], 2, 100)
    scored = CPUModelRunner._get_prompt_logprobs_dict(runner, states, {"of nine": 6, "of none": 3, "part of seven": 4})
    assert set(scored) == {"of nine", "of none"} and set(runner.num_prompt_logprobs) == {"part of seven", "preempted"}
    going_on = runner.requests["part of seven"].in_progress_prompt_logprobs_cpu.logprobs[8:12]
    nine, none = scored["of nine"].logprobs, scored["of none"].logprobs
    for first, values, slot, weight in ((0, nine, 1, 1), (6, none, 0, 0), (9, going_on, 0, 1)):
        rows = states[first : first + len(values)] * weight
        assert torch.allclose(values[:, 1], (rows @ a[slot, 0].T @ b[slot, 0].T).max(dim=1).values, rtol=1e-4)
    print(wrapper.sampler_indices.tolist())


def test_prompts_are_scored_with_the_adapters_of_their_requests() -> None:
    """With vLLM's own runner and kernels for CPUs the engine ended, whoever asked for log-probabilities of a prompt."""
    done = run_here(scores)
    assert done.stdout == "[1, -1, 0]\n", f"what is sampled has its own as before; {done.stdout}{done.stderr}"


def inspects() -> None:
    from vllm.model_executor.models import registry

    from workers.vllm_engine.patches import patch_cpu_engines

    registry._run_in_subprocess = None  # whatever an engine of another test has made of it
    patch_cpu_engines()
    subprocess.run = None  # as vLLM would call it
    print(registry.ModelRegistry.models["LlamaForCausalLM"].inspect_model_cls().supports_pp)


def test_no_process_is_started_to_find_out_what_a_model_can_do(tmp_path: Path) -> None:
    done = run_here(inspects, VLLM_CACHE_ROOT=str(tmp_path))
    assert done.stdout.split()[-1:] == ["True"], done.stderr
    assert list((tmp_path / "modelinfos").iterdir()), "the next process finds it"


def spreads() -> None:
    """Of a greedy request with two drafts, one that draws with two, a greedy one with one, and one that has none."""
    import torch
    from vllm.platforms import current_platform
    from vllm.v1.sample import rejection_sampler

    from workers.vllm_engine.patches import patch_cpu_engines

    current_platform.register_triton_kernel_overrides()  # as each engine does
    patch_cpu_engines()
    logits, ends = torch.randn(5, 50), torch.tensor([2, 4, 5, 5], dtype=torch.int32)
    asked: Any = types.SimpleNamespace(all_greedy=False, temperature=torch.tensor([0, 0.5, 0, 0.9]))
    asked.top_k = asked.top_p = None
    given = rejection_sampler.apply_sampling_constraints(logits.clone(), ends, asked)
    print(torch.equal(given, logits / torch.tensor([[1], [1], [0.5], [0.5], [1]])))


def test_drafts_have_the_temperature_of_their_own_request() -> None:
    """With vLLM's own kernel for CPUs greedy requests were answered with other tokens beside one that draws."""
    done = run_here(spreads)
    assert done.stdout.split()[-1:] == ["True"], done.stderr


def pads() -> None:
    """Two requests that draw: one with drafts that are likely, and one whose two drafts are none."""
    import torch
    from vllm.platforms import current_platform
    from vllm.v1.sample import rejection_sampler

    from workers.vllm_engine.patches import patch_cpu_engines

    current_platform.register_triton_kernel_overrides()
    patch_cpu_engines()
    ends, bonus = torch.tensor([2, 4], dtype=torch.int32), torch.zeros(2, 1, dtype=torch.long)
    drawn = []
    for seed in range(400):
        both = {place: torch.Generator().manual_seed(seed + place) for place in range(2)}
        asked = types.SimpleNamespace(all_greedy=False, all_random=True, temperature=torch.ones(2), generators=both)
        logits = torch.full((4, 4), -100.0)
        logits[:2, 3] = logits[2, 0] = logits[2, 1] = 5.0  # what lies before the rows of the second request is likely
        drafts = torch.tensor([3, 3, -1, -1], dtype=torch.int32)
        drawn.append(rejection_sampler.rejection_sample(drafts, [2, 2], 2, ends, None, logits, bonus, asked))
    first, second = torch.stack(drawn).unbind(1)
    likely = torch.full((4, 4), 0.33)
    likely[:, 0] = 0.01  # far more likely to the model than to who drafted it
    drafts = torch.full((4,), -1, dtype=torch.int32)
    unlike = rejection_sampler.rejection_sample(drafts, [2, 2], 2, ends, likely, torch.zeros(4, 4), bonus, asked)
    halves = (
        bool((unlike[:, 1:] == -1).all())
        and 150 < int((second[:, 0] == 0).sum()) < 250
        and bool(((second[:, 0] == 0) | (second[:, 0] == 1)).all())
    )
    print(halves and bool((second[:, 1:] == -1).all()) and bool((first == torch.tensor([3, 3, 0])).all()))


def test_a_draft_that_is_none_is_rejected_and_every_token_may_come_for_it() -> None:
    done = run_here(pads)
    assert done.stdout.split()[-1:] == ["True"], done.stderr


_LOADING = """
import os, sys
import workers.vllm_engine.engine
from vllm.platforms import current_platform
from vllm.triton_utils import dispatcher
before = dict(dispatcher._registry)
current_platform.register_triton_kernel_overrides()  # as each engine does
once = bool(before) and before == dispatcher._registry
from workers.vllm_engine.identity import vllm_schema
print("vllm.v1.worker.cpu_worker" in sys.modules, once, vllm_schema(), len(os.listdir("/proc/self/task")))
"""


def test_what_engines_need_is_loaded_before_they_are_forked() -> None:
    """And no thread is left in the process that is to fork. What it takes for vLLM's schema every process does."""
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", _LOADING], capture_output=True, text=True, timeout=115, env=env)
    found = done.stdout.splitlines()[-1].split() if done.stdout else []
    assert found == ["True", "True", vllm_schema(), "1"], done.stderr


def test_an_engine_reads_its_tokenizer_with_the_first_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm import tokenizers
    from vllm.model_executor.model_loader import base_loader
    from vllm.v1 import structured_output

    from workers.vllm_engine import patches

    read: list[object] = []
    monkeypatch.setattr(tokenizers, "cached_tokenizer_from_config", lambda model: read.append(model) or "a tokenizer")
    for module, name in (
        (structured_output, "cached_tokenizer_from_config"),
        (base_loader, "_get_online_quantization_config"),
    ):
        monkeypatch.setattr(module, name, getattr(module, name))  # given back afterwards
    monkeypatch.setattr(structured_output.StructuredOutputManager, "tokenizer", None, raising=False)
    patches._load_when_needed()
    config = types.SimpleNamespace(
        parallel_config=types.SimpleNamespace(distributed_executor_backend="uni"),
        scheduler_config=types.SimpleNamespace(max_num_seqs=4),
        model_config=types.SimpleNamespace(skip_tokenizer_init=False),
        structured_outputs_config=types.SimpleNamespace(
            reasoning_parser_plugin="", reasoning_parser="", enable_in_reasoning=False
        ),
    )
    manager = structured_output.StructuredOutputManager(config)
    assert read == []
    assert manager.tokenizer == "a tokenizer"
    assert read == [config.model_config]


def test_an_engine_ends_without_a_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.engine.core import EngineCoreProc

    from workers.vllm_engine import patches

    done: list[str] = []
    for name in ("collect", "unfreeze"):
        monkeypatch.setattr(gc, name, lambda *_, name=name: done.append(name))  # given back afterwards
    monkeypatch.setattr(
        EngineCoreProc, "shutdown", lambda engine: (gc.unfreeze(), gc.collect(), done.append("shut down"))
    )
    patches._end_without_collecting()
    EngineCoreProc.shutdown(None)
    assert done == ["shut down"]


def test_second_model_runner_tells_of_preemptions_before_it_touches_the_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own `update_requests`, on a runner of which only this method is real."""
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    from workers.vllm_engine import patches

    monkeypatch.setattr(GPUModelRunner, "update_requests", GPUModelRunner.update_requests)  # given back afterwards
    monkeypatch.setattr(patches, "compiles", lambda config: True)
    patches.patch_as_configured(types.SimpleNamespace(use_v2_model_runner=True, lora_config=None))

    order: list[Any] = []
    connector = types.SimpleNamespace(handle_preemptions=order.append)
    monkeypatch.setattr(patches, "has_kv_transfer_group", lambda: True, raising=False)
    monkeypatch.setattr(patches, "get_kv_transfer_group", lambda: connector, raising=False)
    lengths = np.zeros(1, dtype=np.int32)
    runner = types.SimpleNamespace(
        req_states=types.SimpleNamespace(
            num_computed_tokens_np=lengths,
            prefill_len=types.SimpleNamespace(np=lengths),
            num_computed_prefill_tokens=lengths.copy(),
        ),
        kv_block_zeroer=types.SimpleNamespace(zero_block_ids=order.append),
    )
    step = types.SimpleNamespace(
        scheduled_cached_reqs=types.SimpleNamespace(req_ids=[], num_computed_tokens=[], new_block_ids=[]),
        new_block_ids_to_zero=[3],
        kv_cache_block_copies=None,
        kv_connector_metadata="who was preempted",
    )
    GPUModelRunner.update_requests(runner, step)
    assert order == ["who was preempted", [3]]


def test_what_a_preempted_request_would_have_computed_in_this_step_is_not_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By vLLM's own scheduler: whose prompt came last is preempted, also where it began first and is in the step."""
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request

    from workers.vllm_engine import patches

    monkeypatch.setattr(Scheduler, "_preempt_request", Scheduler._preempt_request)  # given back afterwards
    patches.cache_only_what_is_computed()
    scheduler = scheduler_of(tmp_path / "tiny", blocks=15)
    init_none_hash(sha256)
    hasher = get_request_block_hasher(16, sha256)
    late, early = (
        Request(name, list(range(first, first + length)), SamplingParams(max_tokens=1), None, block_hasher=hasher)
        for name, first, length in (("late", 0, 128), ("early", 200, 112))
    )
    late.arrival_time, early.arrival_time = 1.0, 2.0
    scheduler.add_request(late)
    scheduler.add_request(early)
    assert list(scheduler.schedule().num_scheduled_tokens) == ["late", "early"]
    late.arrival_time = 3.0  # as where its KV has come first
    while True:
        computed = late.num_computed_tokens
        step = scheduler.schedule()
        assert step.num_scheduled_tokens, "both fit"
        if step.preempted_req_ids:
            break
    assert step.preempted_req_ids == {"late"} and list(step.num_scheduled_tokens) == ["early"]
    _, found, *_ = scheduler.kv_cache_manager.get_computed_blocks(late)
    assert 0 < computed == found


@pytest.mark.parametrize("state", ["UNPAUSED", "PAUSED_ALL"])
def test_requests_whose_kv_did_not_come_are_computed_though_together_they_filled_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    """By vLLM's own scheduler: to compute the first it needs blocks that the second has. For a third, which is more
    urgent and waits for KV too, there is room: none is kept for those behind it."""
    from vllm.config import KVTransferConfig
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.core.sched.interface import PauseState
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
    from vllm.v1.request import Request

    from workers.vllm_engine import patches

    name = "_update_from_kv_xfer_finished"
    monkeypatch.setattr(Scheduler, name, getattr(Scheduler, name))  # given back afterwards
    patches.free_what_did_not_come()
    connector = KVTransferConfig(
        kv_connector="PushConnector",
        kv_connector_module_path="connectors.push.connector",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
    )
    scheduler = scheduler_of(tmp_path / "tiny", blocks=33, window=40, kv_transfer_config=connector)
    init_none_hash(sha256)
    hasher = get_request_block_hasher(16, sha256)

    def ask(first: int, arrived_at: float) -> None:
        source = {"endpoint": {"engine_id": "P", "host": "host", "port": 1}, "key": "x"}
        params = {"do_remote_prefill": True, "do_remote_decode": False, "kv_source": source}
        sampling = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": params})
        prompt = list(range(first, first + 192))
        request = Request(f"from {first}", prompt, sampling, None, arrival_time=arrived_at, block_hasher=hasher)
        scheduler.add_request(request)

    def ended(step: Any, failed: set[str]) -> None:
        """The step has been executed; each request gets a token once its prompt is computed."""
        ids = list(step.num_scheduled_tokens)
        tokens = [[7] if scheduler.requests[key].num_computed_tokens == 192 else [] for key in ids]
        transfers = KVConnectorOutput(finished_recving=failed or None, failed_recving=failed)
        index = {key: at for at, key in enumerate(ids)}
        scheduler.update_from_output(
            step,
            ModelRunnerOutput(ids, index, sampled_token_ids=tokens, kv_connector_output=transfers),
        )

    for first in (0, 200):
        ask(first, arrived_at=1.0)
    step = scheduler.schedule()
    assert not step.num_scheduled_tokens and len(scheduler.kv_holding_waiting) == 2, "both wait for their KV"
    ask(400, arrived_at=0.0)
    scheduler.set_pause_state(PauseState[state])
    ended(step, {"from 0", "from 200"})
    scheduler.set_pause_state(PauseState.UNPAUSED)
    step = scheduler.schedule()
    assert [request.request_id for request in scheduler.kv_holding_waiting] == ["from 400"]
    ended(step, {"from 400"})
    for _ in range(60):
        ended(scheduler.schedule(), set())
    assert not scheduler.requests, "all have been computed here"
    assert scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == 32


def collect(store: Path) -> None:
    import torch
    import torch.distributed as dist

    from workers.vllm_engine.patches import spare_groups_of_one

    spare_groups_of_one()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    group = dist.new_group([0], backend="gloo")
    one, two, got = torch.ones(2), torch.full((2,), 2.0), [torch.zeros(2)]
    dist.all_reduce(one, group=group)
    dist.broadcast(one, 0, group=group)
    dist.barrier(group=group)
    assert one.tolist() == [1, 1]
    dist.all_gather(got, two, group=group)
    assert got[0].tolist() == [2, 2]
    dist.all_to_all(got, [one], group=group)
    assert got[0].tolist() == [1, 1]
    dist.reduce_scatter(got[0], [two], group=group)
    assert got[0].tolist() == [2, 2]
    dist.scatter(got[0], [one], 0, group=group)
    assert got[0].tolist() == [1, 1]
    dist.gather(two, got, 0, group=group)
    assert got[0].tolist() == [2, 2]
    objects, told = [None], ["a"]
    dist.all_gather_object(objects, {"b": 1}, group=group)
    dist.broadcast_object_list(told, 0, group=group)
    assert (objects, told) == ([{"b": 1}], ["a"])
    names = {thread.joinpath("comm").read_text() for thread in Path("/proc/self/task").iterdir()}
    assert not [name for name in names if "gloo" in name], names
    print("copies")


def test_a_group_of_one_rank_has_no_threads_and_its_collectives_are_copies(tmp_path: Path) -> None:
    done = run_here(functools.partial(collect, tmp_path / "store"))
    assert done.stdout.endswith("copies\n"), done.stderr
