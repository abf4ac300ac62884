"""The real router and its link to the fleet, without vLLM: requests in, tokens out, each token checked."""

import asyncio
import uuid
from typing import Any

from support_sim import expected

from orchestrator.config.settings import Config
from orchestrator.frontend.wiring import FleetConnection
from orchestrator.policy.decode_choice import RequestInfo
from orchestrator.policy.prefix_keys import reusable_keys
from orchestrator.process.tasks import cancelled
from orchestrator.router.request import Batch, Failure, ParsedRequest
from orchestrator.store.client import Redis
from orchestrator.types import FinishReason
from workers.sim.codec import SimCodec, WireOutput, WirePrefillStats, WireRequest, WireSampling


class SimRouterCodec:
    """`router.Codec` over the vLLM-free wire structs."""

    def __init__(self) -> None:
        self._codec = SimCodec()

    def read(self, request: WireRequest, block_size: int) -> ParsedRequest:
        assert request.prompt_token_ids is not None and request.sampling_params is not None
        wanted = request.sampling_params.max_tokens or 0
        info = RequestInfo(request.request_id, len(request.prompt_token_ids), wanted, request.arrival_time)
        keys = reusable_keys(request.prompt_token_ids, block_size) if block_size else []
        frames = self._codec.encode_request(request)
        # Simulated tokens depend on prompt and position only: the first is the same everywhere.
        return ParsedRequest(info, frames, request.request_id, early_token=True, prefix_keys=keys)

    def decode_outputs(self, frames: list[bytes], sent_at: float, now: float) -> Batch:
        decoded = self._codec.decode_outputs(frames)
        return Batch(decoded.outputs, decoded.timestamp + now - sent_at)

    def as_first(self, output: WireOutput) -> WireOutput:
        return WireOutput(output.request_id, output.new_token_ids, prefill_stats=output.prefill_stats)

    def drop_told(self, output: WireOutput, tokens: int) -> None:
        output.new_token_ids = output.new_token_ids[tokens:]
        output.prefill_stats = None

    def computed_alone(self, output: WireOutput) -> int | None:
        stats = output.prefill_stats
        return stats.num_computed_tokens if stats is not None and not stats.num_external_cached_tokens else None

    def count_prompt(self, output: WireOutput, cached_tokens: int, created_cache_tokens: int) -> None:
        if output.prefill_stats is not None:
            output.prefill_stats.num_cached_tokens = cached_tokens
            output.prefill_stats.num_cache_creation_tokens = created_cache_tokens

    def failure(self, parsed: ParsedRequest, failure: Failure) -> Any:
        return WireOutput(parsed.info.id, [], finish_reason=FinishReason.ERROR, stop_reason=failure.why)


class RouterClient:
    """One frontend: `ask` a prompt, get its tokens."""

    def __init__(self, redis: Redis, config: Config) -> None:
        self.connection = FleetConnection(f"router-{uuid.uuid4().hex[:6]}", config, redis, SimRouterCodec())
        self._outputs: dict[str, asyncio.Queue[WireOutput]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self.unexpected = 0
        self.prompts: list[WirePrefillStats] = []  # what answers said of their prompts

    async def start(self) -> None:
        self._tasks = [asyncio.create_task(self.connection.run()), asyncio.create_task(self._distribute())]
        await self.connection.synced()
        await self.connection.announce("")

    async def _distribute(self) -> None:
        while True:
            batch = await self.connection.router.batches.get()
            for output in batch.outputs:
                if queue := self._outputs.get(output.request_id):
                    queue.put_nowait(output)
                else:
                    self.unexpected += 1

    async def ask(self, prompt: list[int], max_tokens: int) -> None:
        """Fails unless the answer is exactly the expected one."""
        tokens = await self.answer(prompt, max_tokens)
        assert tokens == expected(prompt, max_tokens), (prompt[:1], tokens)

    async def answer(self, prompt: list[int], max_tokens: int) -> list[int]:
        """The tokens, whichever they are. Fails unless it ended by its length."""
        request_id = f"q-{uuid.uuid4().hex[:10]}"
        queue = self._outputs[request_id] = asyncio.Queue()
        request = WireRequest(request_id, prompt, sampling_params=WireSampling(max_tokens=max_tokens))
        tokens: list[int] = []
        await self.connection.router.submit(request)
        while True:
            output = await queue.get()
            tokens += output.new_token_ids
            if output.prefill_stats is not None:
                self.prompts.append(output.prefill_stats)
            if output.finish_reason is not None:
                break
        del self._outputs[request_id]
        assert output.finish_reason is FinishReason.LENGTH, (request_id, output)
        return tokens

    async def close(self) -> None:
        await cancelled(*self._tasks)
        await self.connection.close()
