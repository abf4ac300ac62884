"""Publishes a worker's load and the changes of its prefix cache.

Both are coalesced, so that a fast engine does not flood frontends. A load report says exactly which submissions it
includes. Changes of the prefix cache are numbered, and a frontend can ask for a snapshot. Keys are those of
`policy.prefix_keys`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable

from orchestrator.process.tasks import left_s, until_told
from orchestrator.types import PauseState, PrefixEvents, WorkerLoad
from orchestrator.wire.messages import PrefixSnapshot
from workers.attempts import NOT_GIVEN, Attempt, Attempts
from workers.engine import Engine, EngineDead, EngineLoad, PrefixChanges, PrefixDelta
from workers.load.board import Board

log = logging.getLogger("pd.worker")

LOAD_INTERVAL_S = 0.002  # at least, between two reports
# Every frontend reads every worker's reports. So many in all are at most a fifth of a core ...
REPORTS_PER_S = 2000
# ... until a worker would be silent for so long that two lost reports make it quiet (`fleet/membership.py`).
MAX_LOAD_INTERVAL_S = 0.4
IDLE_REPORT_S = 0.25
ASK_IDLE_S = 30.0  # how often an idle engine is asked, whose figures of recent time age
UNREPORTED_S = 0.025  # how soon to ask the engine after a change that no step may report
# An engine answers between two steps. One that has not answered for so long, and for so many of its longest steps, may
# hang: its worker falls silent, and other workers take its requests. After ENGINE_HUNG_S it is given up.
ENGINE_STUCK_S, STUCK_STEPS, ENGINE_HUNG_S = 5.0, 10.0, 120.0
# Prefixes are used again seconds later, and a batch per engine step would be most of a large fleet's traffic.
PREFIX_INTERVAL_S = 0.02
SNAPSHOT_KEYS = 8192  # keys per message: a frontend reads it within a few milliseconds
_RATE_WINDOW_S = 0.1
_RATE_WEIGHT = 0.3


def load_interval_s(workers: int) -> float:
    """The shortest time between two reports of a worker, seconds, in a fleet of this many workers.

    Between two reports a frontend knows only its own submissions to a worker. In a large fleet the other frontends send
    little to one worker in that time.
    """
    return min(max(LOAD_INTERVAL_S, workers / REPORTS_PER_S), MAX_LOAD_INTERVAL_S)


class PrefillRate:
    """Prefilled tokens per second of the time with prompts to compute, exponentially weighted over 0.1 s windows."""

    def __init__(self) -> None:
        self.tokens_per_s = 0.0
        self._since: float | None = None
        self._tokens = 0

    def busy(self, now: float) -> None:
        """Start the clock: there are tokens to prefill. Idempotent."""
        if self._since is None:
            self._since = now

    def prefilled(self, tokens: int, more: bool, now: float) -> None:
        """Count computed tokens. `more`: other prompts still wait, so the clock goes on."""
        if self._since is None:
            return
        self._tokens += tokens
        elapsed_s = now - self._since
        if self._tokens and elapsed_s > 0 and (elapsed_s >= _RATE_WINDOW_S or not more):
            sample = self._tokens / elapsed_s
            # A short window is weighted by its length.
            weight = _RATE_WEIGHT * min(1.0, elapsed_s / _RATE_WINDOW_S) if self.tokens_per_s else 1.0
            self.tokens_per_s += weight * (sample - self.tokens_per_s)
            self._since, self._tokens = now, 0
        if not more:
            self.idle()

    def idle(self) -> None:
        """Stop the clock: no prompt waits any more."""
        self._since, self._tokens = None, 0


class Paced:
    """`soon` publishes, and not sooner than an interval after the last time."""

    def __init__(self, publish: Callable[[], None], interval_s: Callable[[], float]) -> None:
        self._publish, self._interval_s = publish, interval_s
        self._published_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def soon(self) -> None:
        if self._timer is not None:
            return
        wait_s = self._published_at + self._interval_s() - time.monotonic()
        if wait_s <= 0:
            self.now()
        else:
            self._timer = asyncio.get_running_loop().call_later(wait_s, self.now)

    def now(self) -> None:
        self.close()
        self._published_at = time.monotonic()
        self._publish()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class LoadReporter:
    """Publishes the load after events that its methods report. `publish` never waits.

    A report includes every submission that has come. What the engine's figures do not show of them yet is added here:
    of those that wait for an adapter or a fetched prefix, and of those that the engine was given since the step before
    its present one began.
    """

    def __init__(
        self,
        worker_id: str,
        blocks_total: int,
        attempts: Attempts,
        publish: Callable[[WorkerLoad], None],
        corrupt_messages: Callable[[], int] = int,
        workers: Callable[[], int] = int,
    ) -> None:
        """`workers`: returns the number of workers in the fleet."""
        self._worker_id, self.blocks_total = worker_id, blocks_total
        self._attempts, self._publish, self._corrupt_messages = attempts, publish, corrupt_messages
        self._board, self.rate = Board.to_measure(), PrefillRate()
        self.engine = EngineLoad(blocks_free=blocks_total, running=0, waiting=0, step_ms=0.0)
        self.longest_step_s, self.stuck = 0.0, False
        self.prefix_sequence = 0  # of the last prefix batch published before the next report
        self.pause = PauseState()  # the newest that this worker has received
        self._fetches, self._fetched_tokens = Counter[str](), 0
        self.rests_from: Callable[[], list[str]] = list  # see `WorkerLoad`
        self.dirty = asyncio.Event()  # set by a change that no step may report
        self.steps = 0
        self._seen: dict[str, int] = {}  # the highest submission number of each frontend
        self._sequence = int(time.time() * 1e6)  # after its predecessor's, of which some may still be read
        self._paced = Paced(self._publish_now, lambda: load_interval_s(workers()))
        self.publish_soon, self.close = self._paced.soon, self._paced.close

    def added(self) -> None:
        """Call after an attempt was added."""
        if self._attempts.waiting_tokens:
            self.rate.busy(time.monotonic())
        self.dirty.set()

    def submitted(self, frontend_id: str, sequence: int) -> None:
        """A submission was added to the attempts or refused: later reports include it."""
        self._seen[frontend_id] = max(self._seen.get(frontend_id, 0), sequence)
        self.dirty.set()

    def given(self, attempt: Attempt) -> None:
        """The engine was given it, or it has ended before, or a step has shown it already."""
        if attempt in self._attempts.unsettled:
            self._attempts.unsettled[attempt] = self.steps
        self.dirty.set()

    def paused(self, state: PauseState) -> None:
        """An operator paused or resumed the fleet: the next report tells every frontend."""
        self.pause = state
        self.dirty.set()

    @property
    def frontends(self) -> set[str]:
        """The frontends whose submission numbers are in the reports."""
        return set(self._seen)

    def forget(self, frontend_id: str) -> None:
        self._seen.pop(frontend_id, None)

    def prefilled(self, tokens: int) -> None:
        """Call after the attempts were updated."""
        self.rate.prefilled(tokens, self._attempts.waiting_tokens > 0, time.monotonic())

    def fetched(self, outcome: str, tokens: int) -> None:
        """A prefix was fetched from another worker's cache, or not. The wait for it is no time of computing."""
        self._fetches[outcome] += 1
        self._fetched_tokens += tokens
        self.rate.idle()
        if self._attempts.waiting_tokens:
            self.rate.busy(time.monotonic())
        self.dirty.set()

    def stepped(self, load: EngineLoad) -> None:
        """A step ended. It may have begun before the latest submissions; the next one begins after them."""
        self.steps += 1
        given_at = self._attempts.unsettled.items()
        self._attempts.settle(*[attempt for attempt, steps in given_at if steps <= self.steps - 2])
        self.engine = load
        if load.step_ms / 1e3 <= self.stuck_after_s:  # else the engine hung in it
            self.longest_step_s = max(self.longest_step_s, load.step_ms / 1e3)
        self.publish_soon()

    def measured(self, load: EngineLoad, given: list[Attempt]) -> None:
        """The engine was asked for its load, after it was `given` these."""
        self._attempts.settle(*given)
        self.engine = load
        self.publish_soon()

    @property
    def unsettled(self) -> list[Attempt]:
        """Those that the engine was given and its load may not include."""
        return [attempt for attempt, steps in self._attempts.unsettled.items() if steps < NOT_GIVEN]

    @property
    def stuck_after_s(self) -> float:
        """Seconds without an answer after which the engine may hang."""
        return max(ENGINE_STUCK_S, STUCK_STEPS * self.longest_step_s)

    @property
    def held(self) -> bool:
        """Whether the engine has requests, or memory of ended ones."""
        load = self.engine
        return bool(len(self._attempts) or load.blocks_free < self.blocks_total or load.running or load.waiting)

    async def run(self, engine: Engine, measured: Callable[[], None]) -> None:
        """Report while no step does: memory freed by aborts and ended transfers, and a sign of life. Raises EngineDead.

        `measured` is called each time after the engine was asked for its load.
        """
        measured_at_step, measured_at = -1, time.monotonic()
        while True:
            steps = self.steps
            if await until_told(self.dirty, UNREPORTED_S if self.unsettled else left_s(IDLE_REPORT_S)):
                await asyncio.sleep(UNREPORTED_S)  # one question for several changes
            if self.steps != steps:
                continue  # steps are running, and report themselves
            aged = time.monotonic() - measured_at > ASK_IDLE_S
            if self.held or self.unsettled or measured_at_step != steps or aged:
                measured_at_step, measured_at = steps, time.monotonic()
                given = self.unsettled
                self.measured(await self._ask(engine), given)
                measured()
            else:
                self.publish_soon()

    async def _ask(self, engine: Engine) -> EngineLoad:
        """Ask the engine for its load. Raises EngineDead, also if it has not answered for ENGINE_HUNG_S."""
        asking = asyncio.create_task(engine.load(), name="engine-load")
        stuck_s, waited_s = self.stuck_after_s, 0.0
        try:
            while not (await asyncio.wait({asking}, timeout=IDLE_REPORT_S))[0]:
                waited_s += IDLE_REPORT_S  # a clock would count the time in which this process stood still
                if waited_s > ENGINE_HUNG_S:
                    raise EngineDead(f"the engine has not answered for {ENGINE_HUNG_S:g} s")
                if waited_s <= stuck_s:
                    self.publish_soon()  # shows that the worker lives during a long step
                elif not self.stuck:
                    self.stuck = True
                    log.warning("the engine has not answered for %.3g s: its requests go to other workers", stuck_s)
            if self.stuck:
                log.warning("the engine answers again, after %.3g s", waited_s)
            return asking.result()
        finally:
            asking.cancel()
            self.stuck = False

    def _publish_now(self) -> None:
        if not self._attempts.waiting_tokens:
            self.rate.idle()
        self._sequence += 1
        engine, unsettled = self.engine, self._attempts.unsettled
        self._publish(
            WorkerLoad(
                worker_id=self._worker_id,
                sequence=self._sequence,
                blocks_total=self.blocks_total,
                blocks_free=max(0, engine.blocks_free - sum(attempt.blocks for attempt in unsettled)),
                running=engine.running,
                waiting=engine.waiting + len(unsettled),
                waiting_tokens=self._attempts.waiting_tokens,
                step_ms=engine.step_ms,
                seen=dict(self._seen),
                prefill_tokens_per_s=self.rate.tokens_per_s,
                kv=engine.kv,
                prefix_sequence=self.prefix_sequence,
                pause=self.pause,
                corrupt_messages=self._corrupt_messages(),
                fetches=dict(self._fetches),
                fetched_tokens=self._fetched_tokens,
                rests_from=self.rests_from(),
                group=self._board.counters() if self._board is not None else None,
                adapters=engine.adapters,
                adapter_load_s=engine.adapter_load_s,
                decodes=self._attempts.decode_count,
            )
        )


class PrefixReporter:
    """Publishes changes of the prefix cache that the engine reports. `publish` and `send` never wait."""

    def __init__(
        self,
        worker_id: str,
        publish: Callable[[PrefixEvents], None],
        send: Callable[[str, PrefixSnapshot], object],
        load: LoadReporter,
    ) -> None:
        self._worker_id, self._publish, self._send, self._load = worker_id, publish, send, load
        # As large as the engine's cache and its host tier, oldest first. True: that tier alone has it.
        self._keys: dict[int, bool] = {}
        self._changes = PrefixChanges()
        self._sequence = int(time.time() * 1e6)  # so that a restarted worker does not continue the old sequence
        self._paced = Paced(self._publish_now, lambda: PREFIX_INTERVAL_S)
        self.close = self._paced.close

    def changed(self, delta: PrefixDelta) -> None:
        if delta.cleared:
            self._keys.clear()
        for key in delta.removed:
            self._keys.pop(key, None)
        self._keys |= dict.fromkeys(delta.stored, False) | dict.fromkeys(delta.hosted, True)
        self._changes.add(delta)
        self._paced.soon()

    def cleared(self) -> None:
        """The cache was reset. The engine reports that only with its next step; until then frontends would route
        prompts to prefixes that are gone."""
        if self._keys:
            self.changed(PrefixDelta([], [], cleared=True))

    def snapshot(self, frontend_id: str) -> None:
        """Send every cached key to this frontend. If that fails, the frontend asks again."""
        if self._changes:
            self._paced.now()  # a snapshot is as of the last batch
        keys = list(self._keys.items())
        for start in range(0, len(keys) or 1, SNAPSHOT_KEYS):
            end = start + SNAPSHOT_KEYS
            part = PrefixSnapshot(self._sequence, [], more=end < len(keys))
            for key, hosted in keys[start:end]:
                (part.hosted if hosted else part.keys).append(key)
            if not self._send(frontend_id, part):
                return

    def _publish_now(self) -> None:
        self._sequence += 1
        delta = self._changes.take()
        changes = delta.stored, delta.removed, delta.cleared, delta.hosted
        self._publish(PrefixEvents(self._worker_id, self._sequence, *changes))
        self._load.prefix_sequence = self._sequence
