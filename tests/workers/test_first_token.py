"""The first token from prefill, over real sockets and the whole path: sent early, sent once, survived when wrong."""

import asyncio

import pytest
from support_bench import counted
from support_router import RouterClient
from support_wait import until
from support_workers import LocalWorker, Workers, expected, running_workers

from orchestrator.launch.host.redis_server import EmbeddedRedis
from orchestrator.policy.prefix_index import PrefixIndex
from orchestrator.types import Role
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


async def test_first_token_arrives_once_during_transfer(workers: Workers) -> None:
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
    look_up = PrefixIndex.look_up
    monkeypatch.setattr(PrefixIndex, "look_up", lambda index, keys: look_up(index, []))


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


@pytest.mark.parametrize("max_tokens", [2, 8])
async def test_diverged_answer_continues_after_sent_token(
    workers: Workers, monkeypatch: pytest.MonkeyPatch, max_tokens: int
) -> None:
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
