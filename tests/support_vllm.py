"""Real engines for tests: a tiny model with random weights, and helpers that drive an `Engine` by hand."""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import os
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from support_wait import until

from orchestrator.config.settings import KVConfig
from orchestrator.process.tasks import cancelled
from orchestrator.types import KVSource
from orchestrator.wire.addresses import free_ports
from workers.engine import EngineInfo, EngineLoad, EngineRequest, Group, Phase

BLOCK_SIZE = 32
INTERPRETED = bool(os.environ.get("VLLM_USE_V2_MODEL_RUNNER"))  # the second model runner's kernels are
PATIENCE_S = 300.0 if INTERPRETED else 60.0  # what an engine has to do may take a minute
VOCABULARY = 512


def tiny_model(
    folder: Path,
    *,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    hidden: int = 128,
    positions: int = 4096,
    vocabulary: int = VOCABULARY,
) -> Path:
    """A Llama of random float32 weights, a few MB; written once per folder."""
    import torch
    from safetensors.torch import save_file

    if (folder / "config.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    inner = 128  # of no interest here: KV is what is tested
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocabulary,
        "max_position_embeddings": positions,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    generator = torch.Generator().manual_seed(7)

    def weight(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.2

    tensors = {"model.embed_tokens.weight": weight(vocabulary, hidden), "lm_head.weight": weight(vocabulary, hidden)}
    tensors["model.norm.weight"] = torch.ones(hidden)
    for index in range(layers):
        prefix = f"model.layers.{index}."
        tensors[prefix + "self_attn.q_proj.weight"] = weight(heads * head_dim, hidden)
        tensors[prefix + "self_attn.k_proj.weight"] = weight(kv_heads * head_dim, hidden)
        tensors[prefix + "self_attn.v_proj.weight"] = weight(kv_heads * head_dim, hidden)
        tensors[prefix + "self_attn.o_proj.weight"] = weight(hidden, heads * head_dim)
        tensors[prefix + "mlp.gate_proj.weight"] = weight(inner, hidden)
        tensors[prefix + "mlp.up_proj.weight"] = weight(inner, hidden)
        tensors[prefix + "mlp.down_proj.weight"] = weight(hidden, inner)
        tensors[prefix + "input_layernorm.weight"] = torch.ones(hidden)
        tensors[prefix + "post_attention_layernorm.weight"] = torch.ones(hidden)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def scheduler_of(folder: Path, blocks: int, window: int | None = None, *, ahead: bool = False, **arguments: Any) -> Any:
    """vLLM's own, as engines of ours have it, with so many blocks of 16 tokens. `window`: of a second layer. `ahead`:
    asynchronous scheduling. `arguments`: of the engine, as `kv_transfer_config`; by default it has no connector."""
    import torch
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
    from vllm.v1.structured_output import StructuredOutputManager

    limits = arguments | {
        "skip_tokenizer_init": True,
        "max_model_len": 512,
        "long_prefill_token_threshold": 32,
        "kv_cache_memory_bytes": 1 << 24,
    }
    made = AsyncEngineArgs(str(tiny_model(folder)), scheduling_policy="priority", block_size=16, **limits)
    config = made.create_engine_config()
    config.cache_config.num_gpu_blocks = blocks
    config.scheduler_config.async_scheduling = ahead  # vLLM turns it off on CPUs
    layout = {"block_size": 16, "num_kv_heads": 1, "head_size": 32, "dtype": torch.float32}
    groups = [KVCacheGroupSpec(["layer"], FullAttentionSpec(**layout))]
    if window is not None:
        groups.append(KVCacheGroupSpec(["windowed"], SlidingWindowSpec(**layout, sliding_window=window)))
    caches = KVCacheConfig(blocks, [], groups)
    return (AsyncScheduler if ahead else Scheduler)(config, caches, StructuredOutputManager(config), 16)


def frames(prompt: list[int], max_tokens: int = 8, *, lora: Any = None, **sampling: Any) -> list[bytes]:
    """An engine request as a frontend encodes it. `lora`: vLLM's LoRARequest."""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.serial_utils import MsgpackEncoder

    params = SamplingParams(**{"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True} | sampling)
    request = EngineCoreRequest("from-the-frontend", prompt, None, params, None, time.time(), lora, None, None)
    return [bytes(frame) for frame in MsgpackEncoder().encode(request)]


def kv_state(engine: Any) -> str:
    """An engine utility for tests: what its end of all KV transfers, over this rank, waits for."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    worker = getattr(get_kv_transfer_group(), "connector_worker", None) if has_kv_transfer_group() else None
    if worker is None or not hasattr(worker, "_inbound"):
        return "no KV connector in this process"
    ends = [*worker._inbound._waiting.values(), *worker._outbound._streams.values()]
    links = {"connecting": worker._connecting, "lost": worker._lost, "links of prefill": dict(worker._outbound._links)}
    links |= {"peers of decode": worker._inbound._peers, "WRITEs in flight": worker._writes}
    links |= {"unanswered pings": worker._pings._unanswered, "pongs": worker._pongs._sent}
    scheduler = engine.scheduler.get_kv_connector().connector_scheduler
    held = {"held": scheduler._held, "lent": list(scheduler.lending.pinned), "loading": list(scheduler.lending.loading)}
    lines = [*map(str, ends), *(f"{name}: {value}" for name, value in (links | held).items())]
    return "\n".join(line[:1000] for line in [f"at {time.monotonic():.1f}", *lines])


@contextlib.contextmanager
def _kept_for_who_listens(port: int) -> Iterator[None]:
    """Nobody who looks for a free port takes this one. Who listens with SO_REUSEADDR, as ZMQ does, can (socket(7))."""
    with socket.socket() as keeper:
        keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        keeper.bind(("127.0.0.1", port))
        yield


class Driver:
    """One engine with its outputs collected per request."""

    running: list[Driver] = []  # in this process; where a wait fails it shows what each of them waits for

    def __init__(self, engine: Any, info: EngineInfo) -> None:
        self.engine, self.info = engine, info
        self.tokens: dict[str, list[int]] = {}
        self.finished: dict[str, Any] = {}
        self.stats: dict[str, Any] = {}
        self.preempted: set[str] = set()
        self.loads: list[EngineLoad] = []
        self.tokens_left: dict[str, list[int]] = {}  # by key, as its steps said one after the other
        self.prefix_keys: set[int] = set()  # held by its cache, as its steps say
        self.error: BaseException | None = None
        self._task = asyncio.create_task(self._collect())

    @classmethod
    async def start(cls, model: Path, *, kv: KVConfig | None = None, name: str = "e", **args: Any) -> Driver:
        from vllm.v1.engine.core import EngineCore

        from workers.vllm_engine.engine import VllmEngine
        from workers.vllm_engine.launch import Setup

        # Its hooks lock around each mmap: a process that is forked meanwhile waits for that lock forever.
        assert "libucm" not in Path("/proc/self/maps").read_text(), "a test has loaded UCX into this process"
        cores = args.pop("cores", None)
        profile, warm, tpot_s = args.pop("profile", False), args.pop("warm", False), args.pop("tpot_s", 0.0)
        given_port = args.pop("kv_port", None)
        kv_port = given_port or next(free_ports("127.0.0.1"))
        group, kv_advertise = args.pop("group", Group()), args.pop("kv_advertise", "127.0.0.1")
        EngineCore.test_kv_state = kv_state  # engines are forked from here
        defaults = {
            "skip_tokenizer_init": True,
            "dtype": "float32",
            "block_size": BLOCK_SIZE,
            "max_model_len": 2048,
            "max_num_batched_tokens": 256,
            "max_num_seqs": 16,
            "kv_cache_memory_bytes": 16 << 20,
        }
        setup = Setup(
            model=str(model),
            engine_args=defaults | args,
            engine_id=f"{name}-{uuid.uuid4().hex[:8]}",
            kv_host="127.0.0.1",
            kv_port=kv_port,
            kv_advertise=kv_advertise,
            kv=kv or KVConfig(),
            cores=cores,
            tpot_s=tpot_s,
        )
        engine = VllmEngine(setup, profile, warm)
        with contextlib.nullcontext() if given_port else _kept_for_who_listens(kv_port):
            try:
                driver = cls(engine, await engine.start(group))
            except ValueError:  # it runs, and cannot serve
                await engine.stop()
                raise
        cls.running.append(driver)
        return driver

    async def _collect(self) -> None:
        try:
            while True:
                step = await self.engine.next_step()
                if step.load is not None:
                    self.loads.append(step.load)
                if (delta := step.prefix) is not None:
                    kept = set() if delta.cleared else self.prefix_keys - set(delta.removed)
                    self.prefix_keys = kept | set(delta.stored)
                for key, tokens in step.tokens_left.items():
                    self.tokens_left.setdefault(key, []).append(tokens)
                for output in step.outputs:
                    key = output.request_id
                    self.tokens.setdefault(key, []).extend(output.new_token_ids)
                    if any(event.type.name == "PREEMPTED" for event in output.events or ()):
                        self.preempted.add(key)
                    if output.prefill_stats is not None:
                        self.stats[key] = output.prefill_stats
                    if output.finish_reason is not None:
                        self.finished[key] = output.finish_reason
        except Exception as error:
            self.error = error

    def source(self, key: str) -> KVSource:
        return KVSource(self.info.kv, key)

    async def prefill(self, key: str, body: list[bytes]) -> None:
        await self.engine.submit(EngineRequest(key, Phase.PREFILL, body))

    async def decode(self, key: str, body: list[bytes], source: KVSource | None = None, **more: Any) -> None:
        await self.engine.submit(EngineRequest(key, Phase.DECODE, body, source, **more))

    async def alone(self, body: list[bytes], timeout_s: float = PATIENCE_S) -> list[int]:
        """The tokens of a request that this engine computes by itself."""
        key = uuid.uuid4().hex
        await self.decode(key, body)
        return await self.done(key, timeout_s)

    async def done(self, key: str, timeout_s: float = PATIENCE_S) -> list[int]:
        await self._until(lambda: key in self.finished or self.error, f"the end of {key}", timeout_s)
        assert self.error is None, self.error
        return self.tokens[key]

    async def idle(self, timeout_s: float = PATIENCE_S) -> None:
        """Nothing runs, nothing waits, and every block is free."""

        async def empty() -> bool:
            load = await self.engine.load()
            return (load.running, load.waiting, load.blocks_free) == (0, 0, self.info.blocks_total)

        await self._until(empty, f"all blocks of {self.info.kv.engine_id} free", timeout_s)

    async def _until(self, condition: Callable[[], Any], what: str, timeout_s: float) -> None:
        try:
            await until(condition, what, timeout_s)
        except AssertionError as error:
            states = [f"{driver.info.kv.engine_id} {await driver._state()}" for driver in Driver.running]
            raise AssertionError("\n".join([str(error), *states])) from None

    async def _state(self) -> str:
        try:
            return str(await asyncio.wait_for(self.engine.call_engine("test_kv_state"), 5.0))
        except TimeoutError:
            return "does not answer: it is stopped, or hangs"
        except Exception as error:
            return f"does not tell its state: {error!r}"

    async def stop(self) -> None:
        if self in Driver.running:
            Driver.running.remove(self)
        await cancelled(self._task)
        await self.engine.stop()


def engine_pid(driver: Driver) -> int:
    """The engine core's process."""
    (process,) = driver.engine._client.resources.engine_manager.processes
    pid = process.pid
    assert pid and os.path.exists(f"/proc/{pid}")
    return int(pid)


def counted_steps(patch: Any) -> Any:
    """A number, of the steps of the engines that are forked from this process from now on. Nothing but an event wakes
    them for a minute."""
    from workers.vllm_engine import loop

    steps, process_step = multiprocessing.get_context("fork").Value("q", 0), loop.process_engine_step

    def counted(engine: Any) -> bool:
        steps.value += 1
        return process_step(engine)

    patch.setattr(loop, "_WOKEN_S", 60.0)
    patch.setattr(loop, "process_engine_step", counted)
    return steps
