"""Every message to a router may be repeated or late; whatever comes when, a client gets its answer.

But the outputs of an attempt come once and in order: see `tests/orchestrator/wire/test_transport.py`.
"""

import random
import time

import msgspec
import pytest
from support_bench import Bench, FakeRequest, counted

from orchestrator.router.request import State
from orchestrator.types import FinishReason, KVEndpoint, KVSource, Role
from orchestrator.wire.messages import Claimed, Outputs, Prefilled, PrefillFailed, Rejected

TRUTH = list(range(10, 22))
DECODING, PREFILLING = ("d0", "d1", "d2"), ("p0", "p1")


class History:
    """One request and its workers, who do what they may at any time. What has been said may be said again."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.bench = Bench()
        self.bench.add_worker("d2", Role.DECODE)
        self.bench.add_worker("p1", Role.PREFILL)
        self.said: list[tuple[str, object, list[bytes]]] = []
        self.computed: dict[int, list[int]] = {}  # by attempt, what its decode engine has still to say

    async def run(self) -> list[tuple[list[int], int | None]]:
        bench = self.bench
        local = self.random.random() < 0.3
        await bench.router.submit(FakeRequest("r", 10 if local else 1000, max_new_tokens=len(TRUTH)))
        for _ in range(400):
            if "r" not in bench.router.requests:
                break
            self.random.choice([self.again, self.again, self.go_on, self.go_on, self.go_on, self.fail])()
            if self.random.random() < 0.05:
                bench.router.check(time.monotonic() + self.random.choice([0.0, 0.6]))
            await bench.settle()
        else:
            pytest.fail(f"not answered: {bench.router.requests}")
        for _ in range(20):
            self.again()
        return [(tokens, finish) for _, tokens, finish in bench.received()]

    def say(self, worker_id: str, message: object, payload: list[bytes]) -> None:
        self.said.append((worker_id, message, payload))
        self.bench.say(worker_id, message, payload)

    def again(self) -> None:
        active = self.bench.router.requests.get("r")
        current = active.attempt if active is not None else None
        may = [said for said in self.said if not (isinstance(said[1], Outputs) and said[1].attempts == [current])]
        if may:
            self.bench.say(*self.random.choice(may))

    def go_on(self) -> None:
        active = self.bench.router.requests["r"]
        number = active.attempt
        if active.state is State.QUEUED:
            self.claim(number)
        elif active.decode_worker is None:
            return
        elif active.prefill_worker is not None and self.random.random() < 0.4:
            payload = msgspec.msgpack.encode([["r", [TRUTH[0]], FinishReason.LENGTH]])
            self.say(active.prefill_worker, Prefilled("r", number, 0.1), [payload])
        else:
            self.decode(active.decode_worker, number)

    def claim(self, number: int) -> None:
        worker_id = self.random.choice(PREFILLING)
        source = KVSource(KVEndpoint(f"{worker_id}-engine", "127.0.0.1", 1), f"r#{number}")
        self.say(worker_id, Claimed("r", number, source, 0.01), [])

    def decode(self, worker_id: str, number: int) -> None:
        if number not in self.computed:
            (submit,) = (message for _, message in self.bench.submits() if message.attempt == number)
            self.computed[number] = TRUTH[len(submit.resume_tokens) :]
        left, count = self.computed[number], self.random.randint(1, 3)
        tokens, self.computed[number] = left[:count], left[count:]
        finish = None if self.computed[number] else FinishReason.LENGTH
        if tokens:
            payload = msgspec.msgpack.encode([["r", tokens, finish]])
            self.say(worker_id, Outputs([number], 0.0), [payload])

    def fail(self) -> None:
        active = self.bench.router.requests["r"]
        if self.random.random() < 0.7 or active.decode_worker is None:
            return
        worker_id, number = active.decode_worker, active.attempt
        kind = self.random.choice(["reset", "rejected", "prefill failed", "quiet"])
        if kind == "reset":
            self.bench.router.lost.connection_reset(worker_id)
        elif kind == "rejected":
            self.say(worker_id, Rejected("r", number, "draining", leaving=True), [])
        elif kind == "prefill failed" and active.prefill_worker is not None:
            self.say(active.prefill_worker, PrefillFailed("r", number, "why not"), [])
        elif kind == "quiet":
            self.bench.router.lost.worker_quiet(worker_id)


@pytest.mark.parametrize("seeds", [range(100 * number, 100 * (number + 1)) for number in range(5)], ids=str)
async def test_an_answer_is_whole_whatever_is_repeated_or_late(seeds: range) -> None:
    stale = counted("pd_dropped_messages", why="stale")
    for seed in seeds:
        history = History(seed)
        received = await history.run()
        assert [token for tokens, _ in received for token in tokens] == TRUTH, seed
        assert [finish for _, finish in received if finish is not None] == [FinishReason.LENGTH], seed
        history.bench.assert_no_leaks()
    assert counted("pd_dropped_messages", why="stale") > stale + 100
