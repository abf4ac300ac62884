"""The thread that owns NIXL waits until there is something to do, or a message to read."""

import functools
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from connectors.wake import MessageEvent, epolls

pytestmark = pytest.mark.vllm

LONG_S = 60.0  # far more than any of these waits takes
MESSAGES = 5


@pytest.fixture
def connection() -> Iterator[tuple[socket.socket, socket.socket, int]]:
    """Two ends, of which the second is in an epoll instance, as UCX has its own."""
    near, far = socket.socketpair()
    with near, far, select.epoll() as polled:
        polled.register(far, select.EPOLLIN)
        yield near, far, polled.fileno()


def test_a_message_ends_the_wait_and_sets_nothing(connection: tuple[socket.socket, socket.socket, int]) -> None:
    near, far, polled = connection
    event = MessageEvent([polled])
    began = time.monotonic()
    threading.Timer(0.01, near.send, [b"landed"]).start()
    assert not event.wait(LONG_S)
    assert time.monotonic() < began + LONG_S / 2
    assert far.recv(16) == b"landed"


def test_another_thread_ends_the_wait(connection: tuple[socket.socket, socket.socket, int]) -> None:
    event = MessageEvent([connection[2]])
    for _ in range(3):
        began = time.monotonic()
        threading.Timer(0.01, event.set).start()
        assert event.wait(LONG_S)
        event.clear()
        assert time.monotonic() < began + LONG_S / 2
    assert not event.wait(0.002)


def test_what_stays_readable_is_waited_with_and_does_not_delay_other_work(
    connection: tuple[socket.socket, socket.socket, int],
) -> None:
    near, _, polled = connection
    near.send(b"never read")
    event = MessageEvent([polled])
    began, looks = time.monotonic(), 20
    for _ in range(looks):
        assert not event.wait(0.005), "a message is expected: data of which each look reads a part"
    assert (looks - 1) * 0.0004 < time.monotonic() - began
    began, looks = time.monotonic(), 10
    for _ in range(looks):
        assert not event.wait(LONG_S), "none is expected: each look comes after twice the time"
    assert 0.15 < time.monotonic() - began < LONG_S / 2
    event.set()
    assert event.wait(LONG_S)


def test_what_was_closed_ends_no_further_wait() -> None:
    with select.epoll() as polled:
        event = MessageEvent([polled.fileno()])
    assert not event.wait(LONG_S)
    began = time.monotonic()
    assert not event.wait(0.05)
    assert time.monotonic() - began > 0.04


def test_looks_are_rare_only_while_descriptors_tell_of_messages(
    connection: tuple[socket.socket, socket.socket, int],
) -> None:
    near, far, polled = connection
    event = MessageEvent([polled])
    often_s = event.look_s(1.0, connecting=False)

    def message(told: bool) -> None:
        if told:
            near.send(b"landed")
        assert not event.wait(0.001)
        if told:
            far.recv(16)
        event.looked(found=True)

    for _ in range(2):
        for _ in range(40):
            message(told=True)
        assert event.look_s(1.0, connecting=False) > 2 * often_s
        assert event.look_s(1.0, connecting=True) == often_s, "UCX connects by messages of which it may not tell"
        message(told=False)  # it came as a wait ended
        for _ in range(40):
            event.wait(0.0001)  # not for descriptors
            event.looked(found=True)
            event.wait(0.001)
            event.looked(found=False)
        assert event.look_s(1.0, connecting=False) > 2 * often_s
        for _ in range(40):
            message(told=False)  # over RDMA
        assert event.look_s(1.0, connecting=False) == often_s
    assert event.look_s(0.0, connecting=False) < often_s, "by 1% of the wait"


def test_a_message_over_nixl_ends_the_wait() -> None:
    pytest.importorskip("nixl._api")
    # In processes of their own: UCX stays where it has been loaded.
    run = functools.partial(subprocess.Popen, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with run([sys.executable, __file__, "receive"]) as receiver, run([sys.executable, __file__, "send"]) as sender:
        assert receiver.stdout is not None and receiver.stdin is not None and sender.stdin is not None
        try:
            sender.stdin.write(receiver.stdout.readline())
            looks = []
            for number in range(MESSAGES):
                sender.stdin.write(f"{number}\n")
                sender.stdin.flush()
                looks.append(int(receiver.stdout.readline()))
            undisturbed = receiver.stdout.readline()
        finally:
            for process in (receiver, sender):
                assert process.stdin is not None
                process.stdin.close()
    assert max(looks) < 100, "it came when there was something to read"
    assert undisturbed.strip() == "True", "nothing else ends waits"


def receive() -> None:
    """Writes the agent's metadata, for each message how often it looked, and whether waits for none lasted. Ends with
    an error if one is missing."""
    told, sys.stdout = sys.stdout, sys.stderr  # NIXL logs there
    from nixl._api import nixl_agent, nixl_agent_config

    before = epolls()
    settings = nixl_agent_config(enable_prog_thread=False, num_threads=0, capture_telemetry=True)  # as vLLM's
    agent = nixl_agent("receiver", settings)
    event = MessageEvent(epolls() - before)
    print(agent.get_agent_metadata().hex(), file=told, flush=True)
    deadline = time.monotonic() + LONG_S
    for number in range(MESSAGES):
        looks, found = 0, {}
        while not found and time.monotonic() < deadline:
            event.wait(LONG_S if number else 0.01)  # UCX connects with messages of its own
            looks, found = looks + 1, agent.get_new_notifs()
        assert found == {"sender": [str(number).encode()]}
        print(looks, file=told, flush=True)
    lasted = []
    for _ in range(8):  # UCX may have messages of its own
        began = time.monotonic()
        event.wait(0.5)
        lasted.append(time.monotonic() - began > 0.4)
        assert not agent.get_new_notifs()
    print(sum(lasted) > len(lasted) / 2, file=told, flush=True)


def send() -> None:
    """Sends each line after the first to the agent of which the first one has the metadata."""
    from nixl._api import nixl_agent, nixl_agent_config

    agent = nixl_agent("sender", nixl_agent_config(enable_prog_thread=False, num_threads=0))
    other = agent.add_remote_agent(bytes.fromhex(sys.stdin.readline()))
    for line in sys.stdin:
        agent.send_notif(other.decode() if isinstance(other, bytes) else other, line.strip().encode())
        for _ in range(50):
            agent.get_new_notifs()
            time.sleep(0.002)


if __name__ == "__main__":
    {"send": send, "receive": receive}[sys.argv[1]]()
