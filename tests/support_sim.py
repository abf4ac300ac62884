"""Simulated engines for tests: start, feed, collect, and prove that nothing is left reserved."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, overload

from orchestrator.config.settings import KVConfig
from orchestrator.config.simulated import Simulated
from orchestrator.types import FinishReason, KVEndpoint, KVSource
from workers.engine import EngineInfo, EngineLoad, EngineRequest, Phase
from workers.sim.codec import SimCodec, WirePrefillStats, WireRequest, WireSampling
from workers.sim.engine import SimEngine
from workers.sim.request import TokenStream

FAST = Simulated(speed=20)
DEADLINE_S = 60.0


@dataclass
class Collected:
    tokens: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    stats: WirePrefillStats | None = None
    stored: set[int] = field(default_factory=set)  # keys that the engine's prefix cache stored meanwhile


def expected(prompt: list[int], count: int, start: int = 0) -> list[int]:
    """What a simulated engine answers, from position `start` on."""
    stream = TokenStream(prompt)
    return [stream.token(i) for i in range(start, start + count)]


def wire_of(prompt: list[int], sampling: WireSampling) -> list[bytes]:
    return SimCodec().encode_request(WireRequest("ignored", prompt, sampling_params=sampling))


def request_of(
    key: str,
    prompt: list[int],
    max_tokens: int = 8,
    phase: Phase = Phase.DECODE,
    source: KVSource | None = None,
    resume: list[int] | None = None,
) -> EngineRequest:
    frames = wire_of(prompt, WireSampling(max_tokens=max_tokens))
    return EngineRequest(key, phase, frames, kv_source=source, resume_tokens=resume or [])


@overload
async def collect(engine: SimEngine, key: str, /) -> Collected: ...
@overload
async def collect(engine: SimEngine, key: str, /, *keys: str) -> dict[str, Collected]: ...


async def collect(engine: SimEngine, *keys: str) -> Any:
    """Read steps until all these requests have finished."""
    results = {key: Collected() for key in keys}
    async with asyncio.timeout(DEADLINE_S):
        while any(r.finish is None for r in results.values()):
            step = await engine.next_step()
            for result in results.values():
                result.stored.update(step.prefix.stored if step.prefix is not None else ())
            for output in step.outputs:
                if collected := results.get(output.request_id):
                    collected.tokens += output.new_token_ids
                    collected.finish = output.finish_reason
                    collected.stats = output.prefill_stats or collected.stats
    return results if len(keys) > 1 else results[keys[0]]


class SimFixture:
    """Owns engines; `assert_no_leaks` looks at those not stopped yet."""

    def __init__(self) -> None:
        self.engines: dict[SimEngine, EngineInfo] = {}

    async def start(self, config: Simulated = FAST, kv: KVConfig | None = None) -> tuple[SimEngine, EngineInfo]:
        engine = SimEngine(config, "sim-model", kv=kv)
        info = await engine.start()
        self.engines[engine] = info
        return engine, info

    async def pair(
        self, prefill: Simulated = FAST, decode: Simulated = FAST, kv: KVConfig | None = None
    ) -> tuple[SimEngine, SimEngine, KVSource]:
        """A prefill and a decode engine, and where decode gets the KV of `a#1`."""
        engine, info = await self.start(prefill, kv)
        return engine, (await self.start(decode, kv))[0], self.source(info, "a#1")

    @staticmethod
    def source(info: EngineInfo, key: str, engine_id: str | None = None) -> KVSource:
        kv = info.kv
        return KVSource(KVEndpoint(engine_id or kv.engine_id, kv.host, kv.port), key)

    async def until(self, true: Callable[[EngineLoad], bool], engine: SimEngine) -> Literal[True]:
        async with asyncio.timeout(DEADLINE_S):
            while not true(await engine.load()):
                await asyncio.sleep(0.001)
        return True

    async def stop(self, engine: SimEngine) -> None:
        del self.engines[engine]
        await engine.stop()

    async def assert_no_leaks(self) -> None:
        """All blocks of all engines become free, and nothing runs or waits."""
        for engine, info in self.engines.items():
            await self.until(
                lambda load, total=info.blocks_total: (load.blocks_free, load.running, load.waiting) == (total, 0, 0),
                engine,
            )

    async def close(self) -> None:
        for engine in list(self.engines):
            await self.stop(engine)
