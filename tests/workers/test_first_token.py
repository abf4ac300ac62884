"""The first token from prefill, over real sockets and the whole path: sent early, sent once, survived when wrong."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from support_bench import counted
from support_router import RouterClient
from support_wait import until
from support_workers import LocalWorker, Workers, expected, running_workers

from orchestrator.fleet.prefixes import PrefixView
from orchestrator.launch.host.redis_server import EmbeddedRedis
from orchestrator.types import Role
from workers.engine import EngineStep
from workers.prefills import Prefills
from workers.sim.request import SimRequest

# A tenth of a second of KV on the wire for every 500 tokens: decode's own token comes well after prefill's.
SECTIONS = {
    "routing": {"remote_prefill_min_tokens": 100, "first_token": "prefill"},
    "kv": {"transfer": "whole"},
    "sim": {"link_gb_per_s": 0.0655},
}


async def fleet(workers: Workers) -> tuple[RouterClient, LocalWorker, LocalWorker]:
    prefill, decode = await workers.start(Role.PREFILL), await workers.start(Role.DECODE)
    await workers.frontend(prefill, decode)
    return await workers.router(prefill=1, decode=1), prefill, decode


async def test_first_token_arrives_once_during_transfer(redis_server: EmbeddedRedis) -> None:
    async with running_workers(redis_server, **SECTIONS) as workers:
        client, _, _ = await fleet(workers)
        early, wrong = counted("pd_first_tokens_early"), counted("pd_first_token_mismatches")
        asking = [asyncio.create_task(client.ask([i, *range(500)], 8)) for i in range(4)]
        await until(lambda: counted("pd_first_tokens_early") == early + 4, "first tokens")
        waiting = list(client.connection.router.requests.values())
        assert any(active.answer.decoding_at is None for active in waiting)
        await asyncio.gather(*asking)
        assert counted("pd_first_token_mismatches") == wrong and not client.unexpected


def know_no_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts asked again are prefilled remotely again."""
    monkeypatch.setattr(PrefixView, "look_up", lambda view, keys: view.index.look_up([]))


@pytest.mark.parametrize("first_token", ["prefill", "decode"])
async def test_remote_usage_equals_local_usage(
    redis_server: EmbeddedRedis, first_token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    routing = {"first_token": first_token}
    know_no_caches(monkeypatch)

    async def said(**more: object) -> list[tuple[int, int]]:
        async with running_workers(redis_server, **(SECTIONS | {"routing": routing | more})) as workers:
            client, _, _ = await fleet(workers)
            for prompt in ([7, *range(500)], [7, *range(500)], [7, *range(300)]):
                await client.ask(prompt, 8)
            await client.close()
            return [(prompt.num_cached_tokens, prompt.num_cache_creation_tokens) for prompt in client.prompts]

    local = await said(remote_prefill_min_tokens=10_000)
    assert local == [(0, 496), (496, 0), (288, 0)]
    assert await said(remote_prefill_min_tokens=100) == local


async def test_answer_waits_for_cached_token_count(
    redis_server: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    tell = Prefills._tell_prefilled

    def tell_late(*said: Any) -> None:
        asyncio.get_running_loop().call_later(0.2, tell, *said)

    know_no_caches(monkeypatch)
    async with running_workers(redis_server, **SECTIONS) as workers:
        client, _, _ = await fleet(workers)
        monkeypatch.setattr(Prefills, "_tell_prefilled", tell_late)
        monkeypatch.setattr("orchestrator.router.router.HELD_S", 30.0)
        await client.ask([7, *range(500)], 8)
        await client.ask([7, *range(500)], 8)
        await client.close()
        said = [(prompt.num_cached_tokens, prompt.num_cache_creation_tokens) for prompt in client.prompts]
        assert said == [(0, 496), (496, 0)]


async def test_silent_prefill_reports_no_cached_tokens(
    redis_server: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_workers(redis_server, **SECTIONS) as workers:
        client, _, _ = await fleet(workers)
        monkeypatch.setattr(Prefills, "_tell_prefilled", lambda *_: None)
        await client.ask([7, *range(500)], 8)
        await client.close()
        assert [(said.num_cached_tokens, said.num_cache_creation_tokens) for said in client.prompts] == [(0, 0)]


@pytest.mark.parametrize("max_tokens", [2, 8])
async def test_diverged_answer_continues_after_sent_token(
    redis_server: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch, max_tokens: int
) -> None:
    async with running_workers(redis_server, **SECTIONS) as workers:
        client, prefill, _ = await fleet(workers)
        wrong = counted("pd_first_token_mismatches")
        admit = prefill.engine._admit

        def admit_rounded(request: object) -> SimRequest:
            admitted = admit(request)  # type: ignore[arg-type]
            token = admitted.stream.token
            monkeypatch.setattr(admitted.stream, "token", lambda position: token(position) + 1000)
            return admitted

        monkeypatch.setattr(prefill.engine, "_admit", admit_rounded)
        prompts = [[i, *range(500)] for i in range(6)]
        answers = await asyncio.gather(*(client.answer(prompt, max_tokens) for prompt in prompts))
        for prompt, answer in zip(prompts, answers, strict=True):
            right = expected(prompt, max_tokens)
            assert answer == [right[0] + 1000, *right[1:]]
        assert counted("pd_first_token_mismatches") == wrong + 6


async def test_client_leaving_between_tokens_frees_both_sides(redis_server: EmbeddedRedis) -> None:
    async with running_workers(redis_server, **SECTIONS) as workers:
        client, _, _ = await fleet(workers)
        early = counted("pd_first_tokens_early")
        asking = [asyncio.create_task(client.ask([i, *range(500)], 8)) for i in range(4)]
        await until(lambda: counted("pd_first_tokens_early") > early, "a first token")
        router = client.connection.router
        router.abort(list(router.requests))
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        assert not router.requests


async def test_missing_prefill_token_comes_from_decode(
    redis_server: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_workers(redis_server, **SECTIONS) as workers:
        client, prefill, _ = await fleet(workers)
        next_step = prefill.engine.next_step

        async def without_tokens() -> EngineStep:
            step = await next_step()
            for output in step.outputs:
                output.new_token_ids = []
            return step

        monkeypatch.setattr(prefill.engine, "next_step", without_tokens)
        first = [0, *range(500)]
        assert await client.answer(first, 8) == expected(first, 8)  # `next_step` was being awaited already
        prompts = [[i, *range(500)] for i in range(1, 4)]
        early = counted("pd_first_tokens_early")
        assert await asyncio.gather(*(client.answer(p, 8) for p in prompts)) == [expected(p, 8) for p in prompts]
        assert counted("pd_first_tokens_early") == early and not client.unexpected
