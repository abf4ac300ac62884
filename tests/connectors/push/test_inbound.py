"""The decode end, step by step: blocks are given back only when no WRITE can land in them."""

import msgspec
import pytest

from connectors.push.actions import Connect, Cut, Finish, Send
from connectors.push.inbound import Inbound
from connectors.push.states import INBOX, INBOX_ENDS, Inbox, InboxEvent
from connectors.push.wire import Endpoint, Register, Unregister

HERE = Endpoint("D", "host", 1)
SOURCE = Endpoint("P", "host", 2)
ORDER = Register("s", "r", HERE, [[1, 2]], 50)
BACK = Unregister("s", "r", HERE)


@pytest.fixture
def end() -> Inbound:
    """Registered with two ranks of P."""
    end = Inbound(timeout_s=10)
    assert end.register(ORDER, SOURCE, 0.0) == [Connect(SOURCE)]
    sent = Register("s", "r", HERE, [[1, 2]], 50, valid_s=9.5)
    assert end.connected("P", ("P/0", "P/1"), 0.5) == [Send("P", "P/0", sent), Send("P", "P/1", sent)]
    return end


def test_received_when_every_peer_has_landed(end: Inbound) -> None:
    assert end.landed("r", "P/0", 1.0) == []
    assert end.landed("r", "P/0", 1.1) == []  # a repeat is not the other one
    assert end.landed("r", "P/1", 1.2) == [Finish("r", True)]
    assert not end.busy


def test_one_refusal_withdraws_from_the_others_first(end: Inbound) -> None:
    assert end.gone("r", "P/0", "aborted", 1.0) == [Send("P", "P/1", BACK)]
    assert end.gone("r", "P/1", "withdrawn", 2.0) == [Finish("r", False, "aborted")]


def test_one_missing_peer_fails_transfer(end: Inbound) -> None:
    assert end.landed("r", "P/0", 1.0) == []
    assert end.gone("r", "P/1", "a WRITE failed", 2.0) == [Finish("r", False, "a WRITE failed")]


def test_blocks_in_which_failed_writes_may_land_are_freed_when_their_peer_is_cut_off(end: Inbound) -> None:
    """First all other peers answer: who knows of the withdrawal posts nothing over a new connection either."""
    end.hello("P/0", 3, 0.6)
    assert end.gone("r", "P/0", "a WRITE failed", 1.0, failed_epoch=3) == [
        Send("P", "P/0", BACK),
        Send("P", "P/1", BACK),
    ]
    cut = Cut("P", ("r",), settled=False, answered=True, epochs=frozenset({("P/0", 3)}))
    assert end.gone("r", "P/1", "withdrawn", 1.1) == [cut]
    assert end.gone("r", "P/0", "a WRITE failed", 1.2, failed_epoch=3) == []  # repeated
    assert cut in end.tick(2.1), "it could not be cut off at the first try"
    assert end.cut_off(cut, 2.2) == [Finish("r", False, "a WRITE failed")]


def test_a_connection_is_cut_once_for_all_writes_that_failed_on_it(end: Inbound) -> None:
    """Each cut fails the WRITEs in flight: answered with cuts of what was connected since, they would never end."""
    for request in ("q", "t"):
        end.register(msgspec.structs.replace(ORDER, request=request), SOURCE, 0.6)
    for peer in ("P/0", "P/1"):
        end.hello(peer, 3, 0.7)
    for request in ("r", "q", "t"):
        end.landed(request, "P/1", 0.9)
    (_, cut) = end.gone("r", "P/0", "a WRITE failed", 1.0, failed_epoch=2)
    end.gone("q", "P/0", "a WRITE failed", 1.1, failed_epoch=3)
    assert end.cut_off(cut, 1.2) == [Finish("r", False, "a WRITE failed"), Finish("q", False, "a WRITE failed")]
    assert end.gone("t", "P/0", "a WRITE failed", 1.3, failed_epoch=3) == [Finish("t", False, "a WRITE failed")]
    end.register(ORDER, SOURCE, 2.0)
    end.landed("r", "P/1", 2.1)
    assert isinstance(end.gone("r", "P/0", "a WRITE failed", 2.2, failed_epoch=4)[-1], Cut)
    (registered, _) = end.register(msgspec.structs.replace(ORDER, request="u"), SOURCE, 2.3)
    assert (registered.message.epoch, registered.message.cut) == (3, 3), "the peer has to make another"


def test_writes_that_failed_have_their_time_from_the_answer_on(end: Inbound) -> None:
    """Nothing is posted after it: a card that repeats them gives up, though the registration is still valid."""
    end.landed("r", "P/1", 1.0)
    assert end.gone("r", "P/0", "a WRITE failed", 1.0, failed_epoch=1)[-1] == Cut("P", ("r",), False, answered=True)
    assert Cut("P", ("r",), False, answered=True) in end.tick(10.9)
    assert Cut("P", ("r",), True, answered=True) in end.tick(12.0)


def test_a_refusal_that_nobody_waits_for_in_blocks_is_an_answer(end: Inbound) -> None:
    end.release_unused(Unregister("t", "q", HERE), SOURCE, 1.0)
    end.gone("q", "P/0", "a WRITE failed", 1.1, failed_epoch=1)
    end.gone("q", "P/1", "a WRITE failed", 1.1, failed_epoch=1)
    end.landed("r", "P/0", 1.2)
    end.landed("r", "P/1", 1.2)
    assert not end.busy


def test_an_abort_waits_for_every_answer_and_asks_again(end: Inbound) -> None:
    both = [Send("P", "P/0", BACK), Send("P", "P/1", BACK)]
    assert end.withdraw("r", "aborted", 1.0) == both
    assert end.withdraw("r", "aborted", 1.1) == []
    assert end.tick(1.3) == []
    assert end.tick(1.7) == both
    assert end.landed("r", "P/0", 1.8) == []
    assert end.tick(2.3) == []  # less and less often
    assert end.tick(3.0) == [Send("P", "P/1", BACK)]
    assert end.gone("r", "P/1", "withdrawn", 3.1) == [Finish("r", False, "aborted")]


def test_kv_that_crosses_the_withdrawal_is_received(end: Inbound) -> None:
    end.withdraw("r", "late", 1.0)
    end.landed("r", "P/0", 1.1)
    assert end.landed("r", "P/1", 1.2) == [Finish("r", True)]


def test_waiting_has_a_deadline(end: Inbound) -> None:
    assert BACK not in [action.message for action in end.tick(9.9)]
    assert end.tick(10.0) == [Send("P", "P/0", BACK), Send("P", "P/1", BACK)]


def test_computing_prefill_extends_wait(end: Inbound) -> None:
    again = Register("s", "r", HERE, [[1, 2]], 50, valid_s=10)
    assert end.computing("r", "P/1", 8.0) == [Send("P", "P/1", again)]
    assert BACK not in [action.message for action in end.tick(17.9)]
    assert end.computing("r", "P/0", 17.9) == [Send("P", "P/0", again)]
    assert end.tick(27.9) == [Send("P", "P/0", BACK), Send("P", "P/1", BACK)]
    assert end.computing("r", "P/0", 28.0) == []  # too late: it has been withdrawn
    assert end.computing("unknown", "P/0", 28.0) == []


def test_unregistered_request_is_freed_at_once() -> None:
    for ending in (
        lambda end: end.withdraw("r", "aborted", 1.0),
        lambda end: end.unreachable("P", "no answer", 1.0),
        lambda end: end.declared_dead("P", 1.0),
        lambda end: end.tick(11.0),
    ):
        end = Inbound(timeout_s=10)
        end.register(ORDER, SOURCE, 0.0)
        (finish,) = ending(end)
        assert (finish.request, finish.ok) == ("r", False)
        assert not end.busy


def test_declared_dead_peer_has_grace_period(end: Inbound) -> None:
    assert end.declared_dead("P", 1.0) == [Send("P", "P/0", BACK), Send("P", "P/1", BACK)]
    assert not any(isinstance(action, Cut | Finish) for action in end.tick(1.9))
    assert end.tick(2.0) == [Cut("P", ("r",), settled=False)]
    assert end.cut_off(Cut("P", ("r",), True), 3.1) == [Finish("r", False, "prefill engine P is dead")]
    # Left alone for a while; named again after that, it must live.
    assert end.register(ORDER, SOURCE, 4.0) == [Finish("r", False, "prefill engine P is dead")]
    assert all(isinstance(action, Send) for action in end.register(ORDER, SOURCE, 16.1))


def test_unsendable_message_ends_wait_for_dead_peer(end: Inbound) -> None:
    assert end.unsendable("P", "P/1", BACK, 1.0) == []  # the network alone proves nothing
    end.declared_dead("P", 2.0)
    assert end.unsendable("P", "P/1", BACK, 2.0) == [Cut("P", ("r",), settled=False)]


def test_blocks_stay_reserved_until_nothing_can_be_written_there(end: Inbound) -> None:
    """Silence proves nothing: a link that heals brings what was written long ago."""
    end.withdraw("r", "aborted", 1.0)
    end.tick(20.0)
    for second in range(21, 100):
        assert Cut("P", ("r",), settled=True) in end.tick(float(second))
    assert end.cut_off(Cut("P", ("another",), True), 100.0) == []
    assert end.landed("r", "P/0", 100.0) == []
    assert end.cut_off(Cut("P", ("r",), True), 100.0) == [Finish("r", False, "aborted")]
    assert end.cut_off(Cut("P", ("r",), True), 100.0) == []


def test_unreadable_answers_prove_life_and_hold_nothing(end: Inbound) -> None:
    end.withdraw("r", "aborted", 1.0)
    assert end.unreadable("P/0", 2.0) == [] == end.unreadable("P/0", 20.0)  # it may still post, or have posted just now
    end.tick(20.0)
    assert end.unreadable("P/0", 23.0) == []
    assert end.unreadable("P/1", 23.0) == [Finish("r", False, "aborted")] and not end.busy


def test_registration_during_cut_continues(end: Inbound) -> None:
    end.withdraw("r", "aborted", 1.0)
    end.declared_dead("P", 2.0)
    assert end.tick(4.0) == [Cut("P", ("r",), settled=False)]
    end.connected("P", ("P/0",), 4.1)
    end.register(Register("t", "q", HERE, [[3]], 9), SOURCE, 30.0)
    assert end.cut_off(Cut("P", ("r", "q"), True), 30.1) == [Finish("r", False, "aborted")]


def test_a_registration_names_the_connection_on_which_the_peer_may_write(end: Inbound) -> None:
    (again,) = end.hello("P/1", 7, 1.0)
    assert again == Send("P", "P/1", Register("s", "r", HERE, [[1, 2]], 50, valid_s=9.0, epoch=7))
    assert end.hello("P/1", 6, 1.1) == [Send("P", "P/1", msgspec.structs.replace(again.message, valid_s=8.9))]
    end.withdraw("r", "aborted", 2.0)
    assert end.hello("P/1", 8, 2.0) == []


def test_reconnection_is_no_proof_of_death(end: Inbound) -> None:
    """The link was cut, the alarm is false, and a registration that was sent is valid there."""
    end.declared_dead("P", 2.0)
    assert end.unsent("P/1", BACK, 2.0) == []
    assert end.tick(5.0) == [Cut("P", ("r",), settled=False)]  # its time to answer is over


def test_unsent_registration_waits_for_connection(end: Inbound) -> None:
    end.forget("P")
    assert end.unsendable("P", "P/0", ORDER, 0.5) == []  # the other one may have it
    assert end.unsendable("P", "P/1", ORDER, 0.5) == [Connect(SOURCE)]
    assert len(end.connected("P", ("P/0", "P/1"), 0.6)) == 2
    end.unsendable("P", "P/0", ORDER, 0.7)
    end.unsendable("P", "P/1", ORDER, 0.7)
    assert end.unreachable("P", "no answer", 1.0) == [Finish("r", False, "no answer")]


def test_lost_message_is_repeated_after_reconnect(end: Inbound) -> None:
    again = Register("s", "r", HERE, [[1, 2]], 50, valid_s=8.0)
    end.landed("r", "P/0", 1.0)
    end.forget("P")
    assert end.tick(1.9) == [Connect(SOURCE)]
    assert end.connected("P", ("P/0", "P/1"), 2.0) == [Send("P", "P/1", again)]
    end.withdraw("r", "aborted", 2.5)
    end.forget("P")
    assert end.tick(3.6) == [Connect(SOURCE)]
    assert end.connected("P", ("P/0", "P/1"), 4.0) == [Send("P", "P/1", BACK)]


def test_a_registration_is_repeated_less_and_less_often_while_nothing_is_heard(end: Inbound) -> None:
    asked = [end.tick(0.5 + second / 10) for second in range(1, 94)]
    valid = [action.message.valid_s for actions in asked for action in actions if action.peer == "P/0"]
    assert valid == pytest.approx([10.0 - at for at in (1.0, 2.0, 4.0, 8.0)], abs=0.3), (
        "as long as it was valid at first"
    )


def test_the_repeats_of_many_requests_to_a_silent_peer_are_spread_over_turns() -> None:
    end = Inbound(timeout_s=60)
    end.connected("P", ("P/0",), 0.0)
    for number in range(1000):
        end.register(msgspec.structs.replace(ORDER, request=f"r-{number}"), SOURCE, 0.0)
    turns = [len(end.tick(turn / 10)) for turn in range(1, 250)]
    assert sum(turns[:50]) == 3 * 1000, "after half a second, one more and two more"
    assert max(turns) < 500 and 0 < max(turns[100:]) < 150


def test_long_dead_engines_are_forgotten(end: Inbound) -> None:
    for number in range(1000):
        end.declared_dead(f"engine-{number}", float(number))
    assert end.register(ORDER, Endpoint("engine-0", "host", 3), 1000.0)[0] == Connect(Endpoint("engine-0", "host", 3))
    assert len(end._dead) <= 16


def test_unanswered_withdrawal_ends(end: Inbound) -> None:
    end.withdraw("r", "aborted", 1.0)
    for second in range(2, 20):  # what was posted until 10.0 may take as long again
        assert all(isinstance(action, Send) for action in end.tick(float(second)))
    assert end.tick(20.0) == [Cut("P", ("r",), settled=True)]
    assert end.cut_off(Cut("P", ("r",), True), 20.0) == [Finish("r", False, "aborted")]


def test_an_unreachable_answer_does_not_free_what_is_registered(end: Inbound) -> None:
    assert end.unreachable("P", "no answer", 1.0) == []
    assert end.busy


def test_refused_kv_is_released_at_prefill() -> None:
    end = Inbound(timeout_s=10)
    end.register(ORDER, SOURCE, 0.0)
    actions = end.incompatible("P", ("P/0",), "other blocks", 1.0)
    assert actions == [Finish("r", False, "other blocks"), Send("P", "P/0", BACK)]


def test_unused_request_releases_kv_at_prefill() -> None:
    end = Inbound(timeout_s=10)
    assert end.release_unused(BACK, SOURCE, 0.0) == [Connect(SOURCE)]
    assert end.connected("P", ("P/0",), 0.1) == [Send("P", "P/0", BACK)]
    assert end.gone("r", "P/0", "withdrawn", 0.2) == []
    assert not end.busy
    end.release_unused(BACK, SOURCE, 1.0)
    assert end.tick(6.5) == []  # nobody answers: forgotten, since nothing is held for it
    assert not end.busy


def test_an_unused_connection_that_was_dropped_is_made_again(end: Inbound) -> None:
    end.forget("P")
    assert end.register(Register("t", "q", HERE, [[3]], 9), SOURCE, 1.0) == [Connect(SOURCE)]


def test_transition_table_is_complete() -> None:
    """A state in which WRITEs may land is left only by every peer's answer, or when none can reach us."""
    proofs = {InboxEvent.ALL_LANDED, InboxEvent.ALL_ANSWERED, InboxEvent.CUT_OFF}
    for (before, event), after in INBOX.items():
        assert before not in INBOX_ENDS
        if before in (Inbox.REGISTERED, Inbox.WITHDRAWING) and after in INBOX_ENDS:
            assert event in proofs
    assert {before for (before, event) in INBOX if event is InboxEvent.CUT_OFF} == {Inbox.WITHDRAWING}
