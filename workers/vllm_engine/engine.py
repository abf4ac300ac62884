"""The real engine: vLLM's async engine-core client behind the `Engine` interface. No tokenizer, no AsyncLLM."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Coroutine
from functools import partial
from typing import Any

import msgspec
from vllm.config import VllmConfig
from vllm.lora.request import LoRARequest
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.serial_utils import MsgpackEncoder

from orchestrator.policy.predict.estimates import LINK_AGE_S, RecentMaximum
from orchestrator.process.tasks import cancelled, first_of, in_thread
from orchestrator.types import EngineSpeed, KVEndpoint
from orchestrator.wire.control import ENGINE_METHODS
from orchestrator.wire.curve import KeyPair
from workers.engine import (
    EngineDead,
    EngineInfo,
    EngineLoad,
    EngineRequest,
    EngineStep,
    Group,
    link_rate,
)
from workers.vllm_engine.codec.adapters import Adapters
from workers.vllm_engine.codec.messages import (
    RequestCodec,
    correct,
    kv_counters,
    most_of_sampling,
    take_plugin_stats,
    why_refused,
)
from workers.vllm_engine.identity import identity_of
from workers.vllm_engine.launch import Setup, build_config, most_running, start_client
from workers.vllm_engine.patches import compiles, load_for_engines
from workers.vllm_engine.ranks import RankWatch, coordinators
from workers.vllm_engine.speed import measure_speed, warm_up

_STOP_TIMEOUT_S = 5.0
_LAST_WORDS_S = 1.0  # until an engine of which others have died is known to be dead itself, or says why

load_for_engines()  # when this module is imported: engines are forked from this process, or from one of its own


class VllmEngine:
    """See `workers.engine.Engine`. Each object has one engine core (any TP/PP) in a process of its own, which may be
    one of a group.

    `profile`: it measures its speed when it starts. `warm`: it first runs a few requests, so that no client waits for
    one-time set-up.
    """

    def __init__(self, setup: Setup, profile: bool = True, warm: bool = True) -> None:
        self._setup, self._group, self._profile, self._warm = setup, Group(), profile, warm
        self._kv_keys = KeyPair.new() if setup.encrypted else None
        self._client: Any = None
        self._codec: RequestCodec | None = None
        self._adapters = Adapters(self._load_adapter)
        self._encoder = MsgpackEncoder()
        self._steps: asyncio.Queue[EngineStep | None] = asyncio.Queue()
        self._reader: asyncio.Task[None] | None = None
        self._dead: asyncio.Future[None] | None = None
        self._ranks: RankWatch | None = None
        self._why_dead, self._sudden = "has ended", False
        self._blocks_total = 0
        self._cached_block_tokens = 0  # tokens of a block of the prefix cache; 0 without one
        self._last = EngineLoad(0, 0, 0, 0.0)
        # Sums of the connector's statistics: bytes_transferred, num_descriptors, pd_exposed_seconds ...
        self.kv_totals: Counter[str] = Counter()
        self._all_ranks, self._link_bytes_per_s = 1, RecentMaximum(LINK_AGE_S)

    # ---- life --------------------------------------------------------------------------------------------------

    async def start(self, group: Group = Group()) -> EngineInfo:
        """Load the model, which takes seconds to minutes. Raises EngineDead, or ValueError for impossible arguments."""
        self._group = group
        self._dead = asyncio.get_running_loop().create_future()
        # A thread of its own: the loop stays free for heartbeats, and a fork from here inherits no compute threads.
        try:
            self._client, config = await in_thread(self._start_blocking, unwanted=lambda made: made[0].shutdown())
        except (RuntimeError, EngineDeadError) as error:
            raise EngineDead(f"engine for {self._setup.model} did not start: {error}") from error
        self._cached_block_tokens = kv.block_size if (kv := config.cache_config).enable_prefix_caching else 0
        self._reader = asyncio.create_task(self._read())
        facts = await self.call_engine("pd_describe")
        if facts["kv_bytes_per_token"] and not facts["connected"]:
            name = config.parallel_config.worker_cls
            why = f"{name} makes no KV connector, so that no KV could be sent or received; remove it"
            raise ValueError(f"workers.engine_args.worker_cls: {why}")
        self._ranks = RankWatch([*facts["rank_pids"], *coordinators(self._client)], self._rank_ended)
        tasks = await self.call_engine("get_supported_tasks")
        self._blocks_total, self._all_ranks = facts["blocks_total"], config.parallel_config.world_size
        model, parallel = config.model_config, config.parallel_config
        self._codec = RequestCodec(model.max_model_len, model.get_vocab_size(), most_of_sampling(config))
        if (lora := config.lora_config) is not None:
            self._adapters.allow(lora.max_cpu_loras or lora.max_loras, lora.max_loras)
        generates = "generate" in tasks
        if self._warm and generates:
            await warm_up(self, model.get_vocab_size(), config.scheduler_config.max_num_seqs, compiles(config))
        speed = await self._measure(config) if self._profile and generates else EngineSpeed()
        return EngineInfo(
            identity=await in_thread(partial(identity_of, self._setup.model, config, facts["attention_backend"])),
            kv=KVEndpoint(
                engine_id=facts["engine_id"],
                host=self._setup.kv_advertise,
                port=self._setup.kv_port,
                tp_size=parallel.tensor_parallel_size,
                pp_size=parallel.pipeline_parallel_size,
                shards=parallel.decode_context_parallel_size,
                key=self._kv_keys.public if self._kv_keys else "",
            ),
            blocks_total=self._blocks_total,
            max_num_seqs=most_running(config),
            max_num_batched_tokens=config.scheduler_config.max_num_batched_tokens,
            kv_bytes_per_token=facts["kv_bytes_per_token"],
            supported_tasks=tuple(tasks),
            speed=speed,
            adapter_slots=self._adapters.slots,
            lends=facts["lends"] and bool(self._cached_block_tokens),
            lockstep=parallel.data_parallel_size > 1,
        )

    async def _measure(self, config: VllmConfig) -> EngineSpeed:
        model, scheduling = config.model_config, config.scheduler_config
        room = self._blocks_total * config.cache_config.block_size // 2
        most_tokens = min(scheduling.max_num_batched_tokens, model.max_model_len - 1, room)
        return await measure_speed(self, model.get_vocab_size(), most_tokens, most_running(config), compiles(config))

    def _start_blocking(self) -> tuple[EngineCoreClient, Any]:
        try:
            config = build_config(self._setup, self._group)
        except (OSError, RuntimeError, ValueError, TypeError):
            raise
        except Exception as error:  # of a section that is text, say
            raise ValueError(f"vLLM refuses workers.engine_args: {type(error).__name__}: {error}") from error
        return start_client(config, self._setup, self._kv_keys.secret if self._kv_keys else ""), config

    async def stop(self) -> None:
        """End the engine process. Idempotent."""
        if self._ranks is not None:
            self._ranks.close()
        client, self._client = self._client, None
        if client is not None:
            await asyncio.to_thread(client.shutdown, _STOP_TIMEOUT_S)
        await cancelled(self._reader)
        self._died()

    # ---- requests ----------------------------------------------------------------------------------------------

    async def submit(self, request: EngineRequest) -> None:
        self._alive()
        assert self._codec is not None  # set by start(), as the client is
        core = self._codec.decode(request)
        if core.lora_request is not None:
            await self._adapters.prepare(request.key, core.lora_request)
        await self.give(core)

    async def give(self, request: EngineCoreRequest) -> None:
        """Submit vLLM's own request unchanged. Raises EngineDead."""
        await self._sending(self._alive().add_request_async(request))

    async def abort(self, keys: list[str]) -> None:
        self._adapters.use.ended(*keys)
        await self._sending(self._alive().abort_requests_async(keys))

    async def next_step(self) -> EngineStep:
        step = await self._steps.get()
        if step is None:
            self._steps.put_nowait(None)  # later callers get the error too
            raise self._error()
        return step

    def encode_outputs(self, outputs: list[Any], timestamp: float) -> list[bytes]:
        frames = self._encoder.encode(EngineCoreOutputs(outputs=outputs, timestamp=timestamp))
        return [frame if isinstance(frame, bytes) else bytes(frame) for frame in frames]

    # ---- load and control --------------------------------------------------------------------------------------

    async def load(self) -> EngineLoad:
        free, running, waiting = await self.call_engine("pd_load")
        kv = msgspec.structs.replace(self._last.kv, link_bytes_per_s=self._link_bytes_per_s.at(time.monotonic()))
        now = msgspec.structs.replace(self._last, blocks_free=free, running=running, waiting=waiting, kv=kv)
        return self._adapters.use.shown(now)

    async def fail_peer(self, engine_id: str) -> None:
        await self.call_engine("pd_tell_connector", "fail_engine", engine_id)

    async def meet(self, peer: KVEndpoint) -> None:
        await self.call_engine("pd_tell_connector", "meet", msgspec.to_builtins(peer))

    async def lend(self, key: str, frames: list[bytes], tokens: int) -> None:
        await self.call_engine("pd_lend", frames, key, tokens)

    async def call(self, method: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Raises ValueError for a method that is not a control method, RuntimeError for one that failed."""
        if method not in ENGINE_METHODS:
            raise ValueError(f"{method}: not an engine's method; known are {', '.join(sorted(ENGINE_METHODS))}")
        if method in ("add_lora", "fingerprint_lora"):
            if method == "fingerprint_lora":
                return await self._adapters.fingerprint(*args)
            return await self._adapters.add(msgspec.convert(args[0], LoRARequest))
        if method == "remove_lora":
            self._adapters.removed(*args)
        result = await self._answered(getattr(self._alive(), f"{method}_async")(*args, **kwargs))
        return sorted(result) if isinstance(result, set | frozenset) else result

    async def _load_adapter(self, adapter: LoRARequest) -> bool:
        return bool(await self._answered(self._alive().add_lora_async(adapter)))

    async def call_engine(self, method: str, *args: Any) -> Any:
        """An EngineCore method by name. Raises EngineDead, RuntimeError."""
        return await self._answered(self._alive().call_utility_async(method, *args))

    async def _answered(self, calling: Coroutine[Any, Any, Any]) -> Any:
        """The result of a call. Raises RuntimeError if it failed; EngineDead also if the engine dies before it
        answers."""
        assert self._dead is not None
        async with first_of(calling, asyncio.shield(self._dead)) as call:
            if not call.done():
                raise self._error()
            try:
                return call.result()
            except EngineDeadError as error:
                raise self._error() from error
            except Exception as error:
                raise RuntimeError(str(error)) from error

    # ---- inside ------------------------------------------------------------------------------------------------

    def _alive(self) -> Any:
        if self._client is None or self._dead is None or self._dead.done():
            raise self._error()
        return self._client

    def _error(self) -> EngineDead:
        return EngineDead(f"the engine of {self._setup.model} ({self._setup.engine_id}) {self._why_dead}")

    async def _sending(self, sending: Any) -> None:
        try:
            await sending
        except EngineDeadError as error:
            self._died()
            raise self._error() from error

    def _rank_ended(self, why: str) -> None:
        self._why_dead = f"cannot go on: {why}"
        self._sudden |= not self._has_told()  # an engine that has told ends its ranks by itself
        self._died()

    def _has_told(self) -> bool:
        """That it dies: vLLM's task that hears it has ended then. It is cancelled where the process ended without."""
        hearing = self._client.resources.output_queue_task
        return hearing is not None and hearing.done() and not hearing.cancelling()

    async def ended_suddenly(self) -> bool:
        client = self._client
        if client is not None and self._reader is not None and not self._sudden:
            await asyncio.wait([self._reader], timeout=_LAST_WORDS_S)
            self._sudden |= client.resources.engine_dead and not self._has_told()
        return self._sudden

    def _died(self) -> None:
        if self._dead is not None and not self._dead.done():
            self._dead.set_result(None)
        self._steps.put_nowait(None)

    async def _read(self) -> None:
        try:
            while True:
                outputs = await self._client.get_output_async()
                step = EngineStep(outputs.outputs, load=None, timestamp=outputs.timestamp)
                self._adapters.use.ended(*[one.request_id for one in outputs.outputs if one.finish_reason is not None])
                if (stats := outputs.scheduler_stats) is not None:
                    take_plugin_stats(step, stats.kv_connector_stats or {})
                    step.load = self._adapters.use.shown(self._account(stats))
                for output in outputs.outputs:
                    correct(output, self._cached_block_tokens)
                    if output.finish_reason is FinishReason.ERROR and (why := why_refused(output)):
                        step.refused[output.request_id] = why
                self._steps.put_nowait(step)
        except EngineDeadError:
            self._died()
        except asyncio.CancelledError:
            raise
        except Exception:
            self._died()
            raise

    def _account(self, stats: Any) -> EngineLoad:
        details = stats.iteration_details
        worked = details is not None and not details.is_dummy and details.elapsed_ms > 0
        transfers = stats.kv_connector_stats or {}
        for name, values in transfers.items():
            self.kv_totals[name] += sum(values)
            self.kv_totals[f"{name}_count"] += len(values)
        for size, seconds in zip(
            transfers.get("bytes_transferred", ()), transfers.get("transfer_duration", ()), strict=False
        ):
            self._link_bytes_per_s.observe(self._all_ranks * link_rate(size, seconds), time.monotonic())
        self._last = EngineLoad(
            blocks_free=round((1.0 - stats.kv_cache_usage) * self._blocks_total),
            running=stats.num_running_reqs,
            waiting=stats.num_waiting_reqs + stats.num_skipped_waiting_reqs,
            step_ms=details.elapsed_ms if worked else self._last.step_ms,
            kv=kv_counters(self.kv_totals, self._link_bytes_per_s.at(time.monotonic())),
        )
        return self._last
