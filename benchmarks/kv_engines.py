"""Engines of the KV benchmarks: pairs for every way to transfer KV, single engines, and the time of each token."""

from __future__ import annotations

import asyncio
import gc
import os
import statistics
import time
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support_vllm import frames

from benchmarks.kv_tables import RunTimes
from orchestrator.config.settings import KVConfig
from orchestrator.types import KVSource
from orchestrator.wire.addresses import hold_port
from workers.engine import EngineRequest, Phase

_ANSWER_S = 300.0


@dataclass(frozen=True)
class Variant:
    name: str
    transfer: str | None = None  # ours
    connector: str | None = None  # vLLM's
    module: str | None = None
    pull: bool = False
    spins: bool = False  # whether each engine spins a core, also while idle


VARIANTS = [
    Variant("auto", transfer="auto"),
    Variant("chunk", transfer="chunk"),
    Variant("stock push, repaired", connector="PatchedPush", module="benchmarks.kv_stock"),
    Variant("stock pull, repaired", connector="PatchedPull", module="benchmarks.kv_stock", pull=True),
    Variant("layer", transfer="layer"),
    Variant("whole", transfer="whole"),
    Variant("stock push", connector="NixlPushConnector", spins=True),
    Variant("stock pull", connector="NixlConnector", pull=True, spins=True),
]
OURS = VARIANTS[0]


class Running:
    """A started engine, and by request: the times of its tokens, the tokens, the last output."""

    def __init__(self, engine: Any, info: Any) -> None:
        self.engine, self.info = engine, info
        self.times: defaultdict[str, list[float]] = defaultdict(list)  # the engine's monotonic seconds
        # By request: when the step of its first token began, and `waited_s` when it had ended.
        self.first: dict[str, tuple[float, float]] = {}
        self.tokens: defaultdict[str, list[int]] = defaultdict(list)
        self._last: defaultdict[str, asyncio.Future[Any]] = defaultdict(asyncio.get_running_loop().create_future)
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        while True:
            step = await self.engine.next_step()
            step_s = step.load.step_ms / 1e3 if step.load is not None else 0.0
            for output in step.outputs:
                if output.request_id not in self.first:
                    self.first[output.request_id] = step.timestamp - step_s, self.waited_s()
                self.times[output.request_id] += [step.timestamp] * len(output.new_token_ids)
                self.tokens[output.request_id] += output.new_token_ids
                if output.finish_reason is not None:
                    self._last[output.request_id].set_result(output)

    def waited_s(self) -> float:
        """For how long it has waited for its core so far, on which others ran; 0 where the kernel does not count that.
        Of an engine that computes in its own process."""
        (process,) = self.engine._client.resources.engine_manager.processes
        try:
            return int(Path(f"/proc/{process.pid}/schedstat").read_text().split()[1]) / 1e9
        except OSError:
            return 0.0

    async def submit(
        self, key: str, phase: Phase, body: list[bytes], source: KVSource | None = None, **more: Any
    ) -> None:
        await self.engine.submit(EngineRequest(key, phase, body, source, **more))

    async def submit_stock(self, key: str, body: list[bytes], params: dict[str, Any]) -> None:
        """Submit a decode request with the parameters of vLLM's own connectors."""
        request = self.engine._codec.decode(EngineRequest(key, Phase.DECODE, body))
        request.sampling_params.extra_args = {"kv_transfer_params": params}
        await self.engine._client.add_request_async(request)

    async def end(self, key: str) -> Any:
        """The last output of `key`. Raises EngineDead, TimeoutError."""
        await asyncio.wait({self._last[key], self._reader}, timeout=_ANSWER_S, return_when=asyncio.FIRST_COMPLETED)
        if not self._last[key].done():
            if self._reader.done():
                self._reader.result()
            raise TimeoutError(f"{key} did not end within {_ANSWER_S:g} s")
        return self._last.pop(key).result()

    async def stop(self) -> None:
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        await self.engine.stop()


class Pair:
    """A prefill and a decode engine of one variant."""

    def __init__(self, prefill: Running, decode: Running, variant: Variant) -> None:
        self.prefill, self.decode, self.variant = prefill, decode, variant

    async def submit(self, key: str, body: list[bytes]) -> None:
        """Submit to both engines at once, as in a fleet when the job is claimed. Pull waits for the end of prefill."""
        source = KVSource(self.prefill.info.kv, key)
        if self.variant.pull:
            await self.prefill.submit(key, Phase.PREFILL, body)
            output = await self.prefill.end(key)
            await self.decode.submit_stock(key, body, output.kv_transfer_params)
            return
        if self.variant.connector is None:
            await self.decode.submit(key, Phase.DECODE, body, source)
        else:
            await self.decode.submit_stock(key, body, _stock_params(source))
        await self.prefill.submit(key, Phase.PREFILL, body)
        await self.prefill.end(key)

    async def run(self, prompt: list[int]) -> RunTimes:
        """Run one request. The times are by the engines' monotonic clock, which this host's processes share."""
        key = uuid.uuid4().hex
        began = time.monotonic()
        await self.submit(key, frames(prompt, 6))
        waited_s = self.decode.waited_s()
        await self.decode.end(key)
        prefilled, tokens = self.prefill.times.pop(key)[-1], self.decode.times.pop(key)
        step = statistics.median(after - before for before, after in zip(tokens, tokens[1:], strict=False))
        self.prefill.first.pop(key)
        begun, waited_then_s = self.decode.first.pop(key)
        waited_s = max(0.0, waited_then_s - waited_s)
        return RunTimes(prefilled - began, tokens[0] - prefilled - step, step, begun - prefilled, waited_s)

    async def stop(self) -> None:
        await self.prefill.stop()
        await self.decode.stop()


def _stock_params(source: KVSource) -> dict[str, Any]:
    """The parameters of a decode request for vLLM's push."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": source.endpoint.engine_id,
        "remote_host": source.endpoint.host,
        "remote_port": source.endpoint.port,
        "remote_request_id": source.key,
        "tp_size": source.endpoint.tp_size,
    }


def _engine_class(variant: Variant) -> Any:
    from workers.vllm_engine.engine import VllmEngine
    from workers.vllm_engine.launch import build_config, start_client

    class BenchEngine(VllmEngine):
        def _start_blocking(self) -> Any:
            if variant.connector is None:
                return super()._start_blocking()
            config = build_config(self._setup)
            config.kv_transfer_config.kv_connector = variant.connector
            config.kv_transfer_config.kv_connector_module_path = variant.module
            config.kv_transfer_config.kv_connector_extra_config = {}
            return start_client(config, self._setup), config

    return BenchEngine


async def start(
    name: str,
    model: str,
    args: dict[str, Any],
    *,
    variant: Variant = OURS,
    cores: list[int] | None = None,
    **kv: Any,
) -> Running:
    """Start one engine. `cores`: those of a CPU engine; None on a GPU. `kv`: of its KVConfig."""
    from workers.vllm_engine.launch import Setup

    engine_class = _engine_class(variant)
    if not gc.get_freeze_count():
        gc.freeze()  # an engine is forked from here, and looks several times for garbage among what was imported
    held, kv_port = hold_port("127.0.0.1")  # which the engine binds once its model is loaded
    setup = Setup(
        model=model,
        engine_args=args,
        engine_id=f"{name}-{uuid.uuid4().hex[:8]}",
        kv_host="127.0.0.1",
        kv_port=kv_port,
        kv_advertise="127.0.0.1",
        kv=KVConfig(**{"transfer": variant.transfer or "whole"} | kv),
        cores=cores,
        encrypted=False,  # vLLM's own connectors are measured too
    )
    engine = engine_class(setup, profile=False)
    with held:
        return Running(engine, await engine.start())


async def start_pair(variant: Variant, model: str, args: dict[str, Any], cuda: bool, **kv: Any) -> Pair:
    """Start two engines, with these values of their KVConfig. On a CPU each has half of the cores; on GPUs prefill has
    the first one, decode the next one if there is one."""
    cores = sorted(os.sched_getaffinity(0))
    halves = [cores[: len(cores) // 2] or cores, cores[len(cores) // 2 :]]
    engines = []
    for index, name in enumerate(["prefill", "decode"]):
        if cuda:
            import torch

            os.environ["CUDA_VISIBLE_DEVICES"] = str(index % max(1, torch.cuda.device_count()))
        own = None if cuda else halves[index]
        engines.append(await start(name, model, args, variant=variant, cores=own, **kv))
    return Pair(engines[0], engines[1], variant)


@asynccontextmanager
async def running(started: Any) -> AsyncIterator[Any]:
    """The engines of `start(...)` or `start_pair(...)`, which are stopped at the end of the context."""
    engines = await started
    try:
        yield engines
    finally:
        await engines.stop()
