"""The decode end of one worker's KV transfers: which request waits for KV, from whom, and until when.

Each method reports an event at time `now` (monotonic seconds) and returns the actions that follow, in order. There is
no NIXL, no thread and no clock here. The promise: a request is reported finished, which gives its blocks back, only
when no WRITE can land in them any more.
"""

from __future__ import annotations

from typing import Union

import msgspec

from connectors.push.actions import Connect, Cut, Finish, Send
from connectors.push.records import RESEND_S, Awaited, PeerConnections, Waiting
from connectors.push.states import INBOX, INBOX_ENDS, Inbox, InboxEvent
from connectors.push.wire import Endpoint, Message, Register, Unregister

Action = Union[Connect, Send, Cut, Finish]

_CUT_AGAIN_S = 1.0  # between two attempts to make sure that a peer cannot write here
_GRACE_S = 1.0  # for an answer of a peer that was declared dead: the fleet can be wrong
_DEAD_S = 15.0  # for which an engine gets no requests after that
_UNUSED_S = 5.0  # for an answer to what holds no blocks here


class Inbound:
    """Registrations of one decode worker rank, by request id."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._waiting: dict[str, Waiting] = {}
        self.registered_at = 0.0  # the latest of them
        self._peers: dict[str, tuple[str, ...]] = {}  # engine -> agent names, once connected
        self._dead: dict[str, float] = {}  # engine -> until when it is left alone
        self._connections = PeerConnections()

    @property
    def busy(self) -> bool:
        return bool(self._waiting)

    def engines(self) -> set[str]:
        """The prefill engines that requests here wait for."""
        return {waiting.source.engine_id for waiting in self._waiting.values()}

    def awaited(self, now: float) -> set[Awaited]:
        """Whose answers are awaited, of the engines that are connected and not declared dead."""
        return {
            Awaited(engine, peer, waiting.order.decode.engine_id)
            for waiting in self._waiting.values()
            if (engine := waiting.source.engine_id) in self._peers and not self._is_dead(engine, now)
            for peer in waiting.unanswered
        }

    @property
    def withdrawing_blocks(self) -> int:
        """Those of transfers that were given up, kept until no WRITE can land in them."""
        given_up = [it.order.blocks for it in self._waiting.values() if it.state is Inbox.WITHDRAWING]
        return sum(len(group) for groups in given_up for group in groups)

    def order_of(self, request: str) -> Register | None:
        """What was asked for this request, while its blocks wait for KV."""
        waiting = self._waiting.get(request)
        return waiting.order if waiting is not None else None

    # ---- from the scheduler ------------------------------------------------------------------------------------

    def register(self, order: Register, source: Endpoint, now: float) -> list[Action]:
        """The scheduler has reserved blocks: ask `source` to push `order.stream` into them."""
        self._waiting[order.request] = waiting = Waiting(order, source, deadline=now + self._timeout_s)
        self.registered_at = now
        return self._open(waiting, now)

    def release_unused(self, order: Unregister, source: Endpoint, now: float) -> list[Action]:
        """No blocks are reserved for it and none will be: let the prefill engine free the KV that it keeps."""
        if order.request in self._waiting or self._is_dead(source.engine_id, now):
            return []
        reserve = Register(order.stream, order.request, order.decode, [], 0)
        self._waiting[order.request] = waiting = Waiting(reserve, source, deadline=now + _UNUSED_S, silent=True)
        return self._open(waiting, now)

    def withdraw(self, request: str, why: str, now: float) -> list[Action]:
        """The scheduler wants the blocks back. `Finish` follows as soon as it is safe. Unknown requests are ignored."""
        waiting = self._waiting.get(request)
        if waiting is None:
            return []
        return self._apply(waiting, InboxEvent.WITHDRAW, now, why)

    # ---- from the network --------------------------------------------------------------------------------------

    def connected(self, engine: str, peers: tuple[str, ...], now: float) -> list[Action]:
        self._peers[engine] = peers
        actions: list[Action] = []
        for waiting in self._of(engine):
            if waiting.state is Inbox.CONNECTING:
                actions += self._announce(waiting, peers, now)
            else:  # send it again: the earlier message, or its answer, may be lost
                actions += self._repeat(waiting, now)
        return actions

    def unreachable(self, engine: str, why: str, now: float) -> list[Action]:
        """A handshake failed. Registrations that were sent before stay: their WRITEs may still come."""
        self._peers.pop(engine, None)
        actions: list[Action] = []
        for waiting in self._of(engine):
            actions += self._apply(waiting, InboxEvent.UNREACHABLE, now, why)
        return actions

    def incompatible(self, engine: str, peers: tuple[str, ...], why: str, now: float) -> list[Action]:
        """The engine is connected, but its KV does not fit here: tell it to keep none for this engine."""
        sends: list[Action] = []
        for waiting in self._of(engine):
            order = waiting.order
            back = Unregister(order.stream, order.request, order.decode)
            sends += [Send(engine, peer, back) for peer in peers if waiting.state is Inbox.CONNECTING]
        return self.unreachable(engine, why, now) + sends

    def forget(self, engine: str) -> None:
        """The connection was dropped: it was unused, or the link is cut. The next message connects again."""
        self._peers.pop(engine, None)

    def hello(self, peer: str, epoch: int, now: float) -> list[Action]:
        """`peer` has made a new connection, and writes only for registrations that come after it."""
        self._connections.made(peer, epoch)
        actions: list[Action] = []
        for waiting in self._waiting.values():
            if waiting.state is Inbox.REGISTERED and peer in waiting.unanswered:
                actions += self._ask_for_kv(waiting, {peer}, now)
        return actions

    def computing(self, request: str, peer: str, now: float) -> list[Action]:
        """The prefill is still running: start its time-out again, which is for prefills without any message."""
        waiting = self._waiting.get(request)
        if waiting is None or waiting.state is not Inbox.REGISTERED or peer not in waiting.unanswered:
            return []
        waiting.deadline = now + self._timeout_s
        return self._ask_for_kv(waiting, {peer}, now)

    def landed(self, request: str, peer: str, now: float) -> list[Action]:
        return self._answer(request, peer, now, refused=False, why="")

    def gone(self, request: str, peer: str, why: str, now: float, failed_epoch: int = 0) -> list[Action]:
        """`failed_epoch`: as in the message. Where parts of a WRITE may still land, it is no answer yet: once all
        others have answered, this engine is cut off."""
        waiting = self._waiting.get(request)
        if waiting is None or peer not in waiting.unanswered:
            return []
        if failed_epoch:
            waiting.failed[peer] = failed_epoch
        if self._is_settled(waiting, peer, now):
            return self._answer(request, peer, now, refused=True, why=why)
        waiting.refused = True
        return self._apply(waiting, InboxEvent.REFUSED, now, why) + self._cut_failed(waiting, now)

    def unreadable(self, peer: str, now: float) -> list[Action]:
        """An unreadable message came from `peer`, so it runs. It counts as the answer to withdrawals whose
        registrations have expired long enough that the peer posts no WRITE for them any more."""
        actions: list[Action] = []
        for waiting in list(self._waiting.values()):
            if waiting.state is Inbox.WITHDRAWING and now > waiting.settled_at + 2 * _CUT_AGAIN_S:
                actions += self._answer(waiting.order.request, peer, now, refused=True, why="unreadable answers")
        return actions

    def declared_dead(self, engine: str, now: float) -> list[Action]:
        """The fleet reports `engine` dead. Its peers are asked to stop, and have `_GRACE_S` to show that they live."""
        self._dead = {name: until for name, until in self._dead.items() if now < until} | {engine: now + _DEAD_S}
        why = f"prefill engine {engine} is dead"
        actions: list[Action] = []
        for waiting in self._of(engine):
            actions += self._apply(waiting, InboxEvent.WITHDRAW, now, why)
            waiting.give_up_at = min(waiting.give_up_at or now + _GRACE_S, now + _GRACE_S)
        return actions

    def unsendable(self, engine: str, peer: str, message: Message, now: float) -> list[Action]:
        """`message` could not be sent to `peer`. If its engine was declared dead, no answer is waited for."""
        if engine not in self._dead:
            return self.unsent(peer, message, now)
        given_up = [it for it in self._of(engine) if peer in it.unanswered and it.state is Inbox.WITHDRAWING]
        return self._cut(given_up, now)

    def cut_off(self, cut: Cut, now: float) -> list[Action]:
        """`cut` was carried out: no WRITE for its requests can land any more, nor one over its connections."""
        self._connections.were_cut(cut.epochs)
        actions: list[Action] = []
        for waiting in self._of(cut.engine):
            if waiting.order.request in cut.requests:
                actions += self._apply(waiting, InboxEvent.CUT_OFF, now, "")
                continue
            for peer in [peer for peer in waiting.failed if self._is_settled(waiting, peer, now)]:
                actions += self._answer(waiting.order.request, peer, now, refused=True, why="")
        return actions

    def unsent(self, peer: str, message: Message, now: float) -> list[Action]:
        """`message` did not leave: the connection is being made anew, which proves no death.

        Where no registration has left, no WRITE can come: such a request waits for the connection again.
        """
        waiting = self._waiting.get(message.request)
        if waiting is None or not isinstance(message, Register):
            return []
        waiting.registered[peer] -= 1
        if any(waiting.registered.values()):
            return []
        self._apply(waiting, InboxEvent.UNSENT, now, "")
        return [Connect(waiting.source)] if waiting.state is Inbox.CONNECTING else []

    def tick(self, now: float) -> list[Action]:
        """Enforces deadlines and repeats messages. Call it at least every `RESEND_S` while `busy`."""
        actions: list[Action] = []
        overdue: list[Waiting] = []
        for waiting in list(self._waiting.values()):
            if waiting.state is Inbox.WITHDRAWING:
                if now >= (waiting.deadline if waiting.silent else waiting.give_up_at):
                    overdue.append(waiting)
                elif now >= waiting.resend_at:
                    actions += self._repeat(waiting, now)
            elif now >= waiting.deadline:
                why = f"neither KV nor news of its prefill for {self._timeout_s:g} s"
                actions += self._apply(waiting, InboxEvent.WITHDRAW, now, why)
            elif waiting.state is Inbox.REGISTERED and now >= waiting.resend_at:
                actions += self._repeat(waiting, now)
        return actions + self._cut(overdue, now)

    # ---- inside ------------------------------------------------------------------------------------------------

    def _of(self, engine: str) -> list[Waiting]:
        return [waiting for waiting in self._waiting.values() if waiting.source.engine_id == engine]

    def _is_dead(self, engine: str, now: float) -> bool:
        if now >= self._dead.get(engine, now):
            self._dead.pop(engine, None)
        return engine in self._dead

    def _open(self, waiting: Waiting, now: float) -> list[Action]:
        engine = waiting.source.engine_id
        if self._is_dead(engine, now):
            return self._apply(waiting, InboxEvent.WITHDRAW, now, f"prefill engine {engine} is dead")
        if peers := self._peers.get(engine):
            return self._announce(waiting, peers, now)
        return [Connect(waiting.source)]

    def _announce(self, waiting: Waiting, peers: tuple[str, ...], now: float) -> list[Action]:
        waiting.unanswered = set(peers)
        actions = self._apply(waiting, InboxEvent.SENT, now, "")
        if waiting.silent:
            return actions + self._apply(waiting, InboxEvent.WITHDRAW, now, "not needed")
        # The registration is sent only now, so no peer can know these blocks earlier.
        return actions + self._ask_for_kv(waiting, waiting.unanswered, now)

    def _repeat(self, waiting: Waiting, now: float) -> list[Action]:
        """Repeat the last message until it is answered. `Register` and `Unregister` are idempotent. Without a
        connection, try to make one, also after a handshake that failed."""
        if waiting.source.engine_id not in self._peers:
            waiting.repeat_later(now)
            return [Connect(waiting.source)]
        if waiting.state is Inbox.WITHDRAWING:
            return self._ask_to_stop(waiting, now)
        return self._ask_for_kv(waiting, waiting.unanswered, now)

    def _ask_for_kv(self, waiting: Waiting, peers: set[str], now: float) -> list[Action]:
        waiting.repeat_later(now)
        waiting.registered.update(peers)
        order = msgspec.structs.replace(waiting.order, valid_s=max(0.0, waiting.deadline - now))
        return [Send(waiting.source.engine_id, peer, self._connections.name_in(order, peer)) for peer in sorted(peers)]

    def _ask_to_stop(self, waiting: Waiting, now: float) -> list[Action]:
        waiting.repeat_later(now)
        order = waiting.order
        message = Unregister(order.stream, order.request, order.decode)
        return [Send(waiting.source.engine_id, peer, message) for peer in sorted(waiting.unanswered)]

    def _cut(self, overdue: list[Waiting], now: float) -> list[Action]:
        actions: list[Action] = []
        by_engine: dict[tuple[str, bool, bool], list[Waiting]] = {}
        for waiting in overdue:
            if waiting.silent:  # it holds no blocks that could be overwritten
                actions += self._apply(waiting, InboxEvent.CUT_OFF, now, "")
                continue
            waiting.give_up_at = now + _CUT_AGAIN_S
            settled = now >= waiting.settled_at
            by_engine.setdefault((waiting.source.engine_id, settled, waiting.awaits_failed_only), []).append(waiting)
        for (engine, settled, answered), late in by_engine.items():
            epochs = self._connections.of({peer for waiting in late for peer in waiting.unanswered})
            requests = tuple(waiting.order.request for waiting in late)
            actions.append(Cut(engine, requests, settled, answered, epochs))
        return actions

    def _cut_failed(self, waiting: Waiting, now: float) -> list[Action]:
        if not waiting.awaits_failed_only or waiting.give_up_at <= now + _CUT_AGAIN_S:  # then `tick` does
            return []
        waiting.settled_at = min(waiting.settled_at, now + max(self._timeout_s, _GRACE_S))
        return self._cut([waiting], now)

    def _is_settled(self, waiting: Waiting, peer: str, now: float) -> bool:
        """Whether nothing of `peer`, which posts no more WRITEs for it, can land any more."""
        return waiting.silent or waiting.failed.get(peer, 0) <= self._connections.last_cut(peer)

    def _answer(self, request: str, peer: str, now: float, *, refused: bool, why: str) -> list[Action]:
        waiting = self._waiting.get(request)
        if waiting is None or peer not in waiting.unanswered:
            return []
        waiting.unanswered.discard(peer)
        waiting.failed.pop(peer, None)
        waiting.refused = waiting.refused or refused
        if not waiting.unanswered:
            event = InboxEvent.ALL_ANSWERED if waiting.refused else InboxEvent.ALL_LANDED
            return self._apply(waiting, event, now, why)
        actions = self._apply(waiting, InboxEvent.REFUSED, now, why) if refused else []
        return actions + self._cut_failed(waiting, now)

    def _apply(self, waiting: Waiting, event: InboxEvent, now: float, why: str) -> list[Action]:
        after = INBOX.get((waiting.state, event))
        if after is None:
            return []
        waiting.state = after
        waiting.why = waiting.why or why
        if after is Inbox.WITHDRAWING:
            # Peers post no WRITE once the registration has expired.
            waiting.settled_at = max(now, waiting.deadline) + max(self._timeout_s, _GRACE_S)
            waiting.give_up_at, waiting.resend_s = waiting.settled_at, RESEND_S
            return self._ask_to_stop(waiting, now)
        if after in INBOX_ENDS:
            del self._waiting[waiting.order.request]
            if waiting.silent:
                return []
            ok = after is Inbox.RECEIVED
            return [Finish(waiting.order.request, ok, "" if ok else waiting.why)]
        return []
