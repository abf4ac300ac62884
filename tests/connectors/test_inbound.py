"""The decode end, step by step: blocks are given back only when no WRITE can land in them."""

from __future__ import annotations

import pytest

from connectors.push.inbound import Connect, Finish, Inbound, Send
from connectors.push.states import INBOX, INBOX_ENDS, Inbox, InboxEvent
from connectors.push.wire import Endpoint, Register, Unregister

HERE = Endpoint("D", "host", 1)
SOURCE = Endpoint("P", "host", 2)
ORDER = Register("s", "r", HERE, [[1, 2]], 50)
BACK = Unregister("s", "r", HERE)


@pytest.fixture
def end() -> Inbound:
    """Registered with two ranks of P."""
    end = Inbound(timeout_s=10, resend_s=1, silent_s=5)
    assert end.register(ORDER, SOURCE, 0.0) == [Connect(SOURCE)]
    assert end.connected("P", ("P/0", "P/1"), 0.5) == [Send("P", "P/0", ORDER), Send("P", "P/1", ORDER)]
    return end


def test_received_when_every_peer_has_landed(end: Inbound) -> None:
    assert end.landed("r", "P/0", 1.0) == []
    assert end.landed("r", "P/0", 1.1) == []  # a repeat is not the other one
    assert end.landed("r", "P/1", 1.2) == [Finish("r", True)]
    assert not end.busy


def test_one_refusal_withdraws_from_the_others_first(end: Inbound) -> None:
    assert end.gone("r", "P/0", "aborted", 1.0) == [Send("P", "P/1", BACK)]
    assert end.gone("r", "P/1", "withdrawn", 2.0) == [Finish("r", False, "aborted")]


def test_landed_everywhere_but_one_is_a_failure(end: Inbound) -> None:
    assert end.landed("r", "P/0", 1.0) == []
    assert end.gone("r", "P/1", "a WRITE failed", 2.0) == [Finish("r", False, "a WRITE failed")]


def test_an_abort_waits_for_every_answer_and_asks_again(end: Inbound) -> None:
    both = [Send("P", "P/0", BACK), Send("P", "P/1", BACK)]
    assert end.withdraw("r", "aborted", 1.0) == both
    assert end.withdraw("r", "aborted", 1.1) == []
    assert end.tick(1.5) == []
    assert end.tick(2.1) == both
    assert end.landed("r", "P/0", 2.2) == []
    assert end.tick(3.2) == [Send("P", "P/1", BACK)]
    assert end.gone("r", "P/1", "withdrawn", 3.3) == [Finish("r", False, "aborted")]


def test_kv_that_crosses_the_withdrawal_is_received(end: Inbound) -> None:
    end.withdraw("r", "late", 1.0)
    end.landed("r", "P/0", 1.1)
    assert end.landed("r", "P/1", 1.2) == [Finish("r", True)]


def test_waiting_has_a_deadline(end: Inbound) -> None:
    assert end.tick(9.9) == []
    assert end.tick(10.0) == [Send("P", "P/0", BACK), Send("P", "P/1", BACK)]


def test_what_was_never_registered_is_given_back_at_once() -> None:
    for ending in (
        lambda end: end.withdraw("r", "aborted", 1.0),
        lambda end: end.unreachable("P", "no answer", 1.0),
        lambda end: end.peer_dead("P", 1.0),
        lambda end: end.tick(11.0),
    ):
        end = Inbound(timeout_s=10)
        end.register(ORDER, SOURCE, 0.0)
        (finish,) = ending(end)
        assert (finish.request, finish.ok) == ("r", False)
        assert not end.busy


def test_a_dead_peer_ends_what_waits_for_it_and_what_comes_later(end: Inbound) -> None:
    assert end.peer_dead("P", 1.0) == [Finish("r", False, "prefill engine P is dead")]
    assert end.register(ORDER, SOURCE, 2.0) == [Finish("r", False, "prefill engine P is dead")]
    assert end.landed("r", "P/0", 3.0) == []


def test_an_unreachable_answer_does_not_free_what_is_registered(end: Inbound) -> None:
    assert end.unreachable("P", "no answer", 1.0) == []
    assert end.busy


def test_disowning_tells_the_prefill_engine_and_nobody_here() -> None:
    end = Inbound(timeout_s=10, resend_s=1, silent_s=5)
    assert end.disown(BACK, SOURCE, 0.0) == [Connect(SOURCE)]
    assert end.connected("P", ("P/0",), 0.1) == [Send("P", "P/0", BACK)]
    assert end.gone("r", "P/0", "withdrawn", 0.2) == []
    assert not end.busy
    end.disown(BACK, SOURCE, 1.0)
    assert end.tick(6.5) == []  # nobody answers: forgotten, since nothing is held for it
    assert not end.busy


def test_an_unused_connection_that_was_dropped_is_made_again(end: Inbound) -> None:
    end.forget("P")
    assert end.register(Register("t", "q", HERE, [[3]], 9), SOURCE, 1.0) == [Connect(SOURCE)]


def test_the_table_is_sound() -> None:
    """A state in which WRITEs may land is left only by every peer's answer, or by its death."""
    proofs = {InboxEvent.ALL_LANDED, InboxEvent.ALL_ANSWERED, InboxEvent.PEER_DEAD}
    for (before, event), after in INBOX.items():
        assert before not in INBOX_ENDS
        if before in (Inbox.REGISTERED, Inbox.WITHDRAWING) and after in INBOX_ENDS:
            assert event in proofs
    assert {before for (before, event) in INBOX if event is InboxEvent.PEER_DEAD} == set(Inbox) - INBOX_ENDS
