"""The real router and its link to the fleet, without vLLM: requests in, tokens out, each token checked."""

from __future__ import annotations

import asyncio
import os
import uuid
from typing import Any

from support_workers import expected

from orchestrator.config.settings import Config
from orchestrator.frontend.wiring import FrontendLink
from orchestrator.policy.prefix_keys import reusable_keys
from orchestrator.router.codec import Batch
from orchestrator.store.client import Redis
from orchestrator.types import FinishReason, RequestInfo
from workers.sim.codec import SimCodec, WireOutput, WireRequest, WireSampling


class SimRouterCodec:
    """`router.Codec` over the vLLM-free wire structs."""

    def __init__(self) -> None:
        self._codec = SimCodec()

    def describe(self, request: WireRequest) -> tuple[RequestInfo, bool, str]:
        assert request.prompt_token_ids is not None and request.sampling_params is not None
        wanted = request.sampling_params.max_tokens or 0
        info = RequestInfo(request.request_id, len(request.prompt_token_ids), wanted, request.arrival_time)
        return info, True, request.request_id

    def prefix_keys(self, request: WireRequest, block_size: int) -> list[int]:
        return reusable_keys(request.prompt_token_ids or [], block_size) if block_size else []

    def encode(self, request: WireRequest) -> list[bytes]:
        return self._codec.encode_request(request)

    def decode_outputs(self, frames: list[bytes], sent_at: float, now: float) -> Batch:
        decoded = self._codec.decode_outputs(frames)
        return Batch(decoded.outputs, decoded.timestamp + now - sent_at)

    def early(self, request: WireRequest) -> bool:
        return True  # simulated tokens depend on prompt and position only

    def as_first(self, output: WireOutput) -> WireOutput:
        return WireOutput(output.request_id, output.new_token_ids)

    def drop_first(self, output: WireOutput) -> None:
        output.new_token_ids = output.new_token_ids[1:]

    def failure(self, request_id: str) -> Any:
        return WireOutput(request_id, [], finish_reason=FinishReason.ERROR)


class RouterClient:
    """One frontend: `ask` a prompt, get its tokens."""

    def __init__(self, redis: Redis, config: Config) -> None:
        self.link = FrontendLink(f"router-{uuid.uuid4().hex[:6]}", config, redis, SimRouterCodec())
        self._outputs: dict[str, asyncio.Queue[WireOutput]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self.unexpected = 0

    async def start(self) -> None:
        self._tasks = [asyncio.create_task(self.link.run()), asyncio.create_task(self._distribute())]
        await self.link.synced()
        await self.link.announce("", os.getpid())

    async def _distribute(self) -> None:
        while True:
            batch = await self.link.router.batches.get()
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
        await self.link.router.submit(request)
        while True:
            output = await queue.get()
            tokens += output.new_token_ids
            if output.finish_reason is not None:
                break
        del self._outputs[request_id]
        assert output.finish_reason is FinishReason.LENGTH, (request_id, output)
        return tokens

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.link.close()
