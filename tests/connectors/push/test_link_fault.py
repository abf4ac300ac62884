"""Real NIXL over TCP between two living engines whose sockets are cut: what was connected is connected again."""

import os
import random
import socket
import stat
import threading
import time
from pathlib import Path

import pytest
from support_vllm import Driver, frames, tiny_model
from support_wait import until

from orchestrator.config.settings import KVConfig

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

TOKENS = 600
TIMEOUT_S = 120.0  # longer than a test waits for an end: no request waits for a whole time-out


def cut_all_connections() -> None:
    """Shuts down every TCP connection of this process."""
    for entry in os.listdir("/proc/self/fd"):
        try:
            if not stat.S_ISSOCK(os.fstat(int(entry)).st_mode):
                continue
            link = socket.socket(fileno=os.dup(int(entry)))
        except OSError:
            continue
        with link:
            if link.family in (socket.AF_INET, socket.AF_INET6) and link.type == socket.SOCK_STREAM:
                try:
                    link.getpeername()
                    link.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass


def obey(order: Path) -> None:
    while True:
        if order.exists():
            cut_all_connections()
            order.unlink()
        time.sleep(0.005)


async def test_the_next_request_is_transferred_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from connectors.push.worker import PushWorker

    init = PushWorker.__init__

    def init_with_scissors(self: PushWorker, config: object, engine_id: str, caches: object) -> None:
        init(self, config, engine_id, caches)  # type: ignore[arg-type]
        order = tmp_path / engine_id.partition("-")[0]
        threading.Thread(target=obey, args=(order,), daemon=True).start()

    # Inherited by the engine processes, which are forked.
    monkeypatch.setattr(PushWorker, "__init__", init_with_scissors)
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    model = tiny_model(tmp_path / "tiny")
    kv = KVConfig(transfer_timeout_s=TIMEOUT_S, verify=True)
    prefill = await Driver.start(model, name="prefill", kv=kv)
    decode = await Driver.start(model, name="decode", kv=kv, enable_prefix_caching=False)
    body = frames(random.Random(5).choices(range(3, 500), k=TOKENS), 4)
    await decode.decode("right", body)
    right = await decode.done("right")

    async def is_transferred(key: str) -> bool:
        await prefill.prefill(key, body)
        await decode.decode(key, body, prefill.source(key))
        assert await decode.done(key) == right
        return bool(decode.stats[key].num_external_cached_tokens == TOKENS)

    assert await is_transferred("first")
    for number, sides in enumerate([("prefill",), ("decode",), ("prefill", "decode")]):
        for side in sides:
            (tmp_path / side).touch()
        for side in sides:
            await until(lambda side=side: not (tmp_path / side).exists(), what="the cut")
        for name, either in (("after", True), ("later", False)):
            # The first may be computed by decode, if its WRITE failed.
            assert await is_transferred(f"{name}-{number}") or either
        await prefill.idle()
        await decode.idle()
    await prefill.stop()
    await decode.stop()
