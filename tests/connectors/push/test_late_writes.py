"""Real NIXL over TCP between two machines: a WRITE that was on its way when the link was cut, and the link heals."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
SIZE, BLOCK = 64 << 20, 1 << 16

pytestmark = [
    pytest.mark.vllm,  # NIXL comes with it
    pytest.mark.slow,
    pytest.mark.timeout(120),
    pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="makes network namespaces"),
]


class Peer:
    """A process with a NIXL agent, on a machine of its own, which does what it is told."""

    def __init__(self, command: list[str], name: str) -> None:
        self.process = subprocess.Popen(
            [*command, sys.executable, __file__, name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"UCX_TLS": "tcp,self", "PYTHONPATH": str(ROOT)},
        )
        self.about = self.answer()

    def tell(self, name: str, *arguments: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([name, *arguments]) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        assert self.process.stdout is not None
        while not (line := self.process.stdout.readline()).startswith("answer "):
            assert line, "the process has ended"
        return json.loads(line.removeprefix("answer "))

    def ask(self, name: str, *arguments: Any) -> Any:
        self.tell(name, *arguments)
        return self.answer()


@pytest.fixture(scope="module")
def network() -> Iterator[Any]:
    from benchmarks.chaos.network import Network

    try:
        network = Network(["prefill", "decode"], subnet="10.214")  # another test may use the usual one meanwhile
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no network namespaces here: {error}")
    yield network
    network.close()


@pytest.fixture(scope="module")
def peers(network: Any) -> Iterator[tuple[Peer, Peer]]:
    """Every test leaves them connected, but for the last."""
    both = [Peer(network.command(name), name) for name in ("prefill", "decode")]
    prefill, decode = both
    prefill.ask("meet", decode.about)
    decode.ask("meet", prefill.about)
    yield prefill, decode
    for peer in both:
        peer.process.kill()
        peer.process.wait(10)
        assert peer.process.stdin is not None and peer.process.stdout is not None
        peer.process.stdin.close()
        peer.process.stdout.close()


def write_all(prefill: Peer, decode: Peer) -> None:
    prefill.ask("write")
    prefill.tell("wait_for_write", 30.0)
    assert decode.ask("take_in", 20.0, SIZE) == SIZE
    decode.ask("take_in", 1.0, 0)  # it confirms the last of it
    assert prefill.answer() == "DONE"


@pytest.mark.parametrize("how", ["cut", "cut, and the writer was stopped", "left"])
def test_no_write_lands_after_tear_down(network: Any, peers: tuple[Peer, Peer], how: str) -> None:
    prefill, decode = peers
    write_all(prefill, decode)  # all connections are made
    decode.ask("clear")
    prefill.ask("write")
    assert prefill.ask("wait_for_write", 0.3) == "PROC"  # decode takes nothing in: kernels hold what was sent
    if how.endswith("stopped"):
        prefill.process.send_signal(signal.SIGSTOP)
    network.cut("prefill", "decode")
    network.cut("decode", "prefill")
    assert 0 < decode.ask("take_in", 0.2, 0) < SIZE
    if how != "left":
        decode.ask("tear_down")
    decode.ask("clear")  # the blocks are others' now
    network.mend()
    prefill.process.send_signal(signal.SIGCONT)
    prefill.tell("wait_for_write", 5.0 if how == "left" else 20.0)
    landed = decode.ask("take_in", 5.0, 1)
    if how == "left":
        assert landed > 0, "a cut link has lost what was on its way: this test shows nothing"
        prefill.answer()
    else:
        assert landed == 0
        assert prefill.answer() == "ERR"
        prefill.ask("meet", decode.about)
        decode.ask("meet", prefill.about)
        write_all(prefill, decode)


def test_ended_process_differs_from_silent_machine(network: Any, peers: tuple[Peer, Peer]) -> None:
    """The last one: it ends one of them."""
    prefill, decode = peers
    write_all(prefill, decode)
    assert not decode.ask("has_ended")
    prefill.process.send_signal(signal.SIGSTOP)
    assert not decode.ask("has_ended")
    network.cut("prefill", "decode")
    assert not decode.ask("has_ended")
    network.mend()
    prefill.process.kill()
    prefill.process.wait(10)
    assert decode.ask("has_ended")


class Agent:
    """What runs in the processes."""

    def __init__(self, name: str) -> None:
        import numpy as np
        from nixl._api import nixl_agent, nixl_agent_config

        from connectors.sockets import PeerAddresses, listening

        self.peer_addresses, self.np, before = PeerAddresses(), np, listening()
        self.nixl = nixl_agent(name, nixl_agent_config(enable_prog_thread=False, num_threads=4))
        self.listens = [(address.hex(), port, inode) for address, port, inode in listening() - before]
        self.memory = np.full(SIZE, 1 if name == "prefill" else 0, dtype=np.uint8)
        self.nixl.register_memory([(self.memory.ctypes.data, SIZE, 0, "")], "DRAM")
        self.peer: str | None = None

    def about(self) -> list[Any]:
        return [self.nixl.get_agent_metadata().hex(), self.memory.ctypes.data, self.listens]

    def blocks(self, start: int) -> Any:
        return self.nixl.get_xfer_descs([(start + at, BLOCK, 0) for at in range(0, SIZE, BLOCK)], "DRAM")

    def meet(self, other: list[Any]) -> None:
        metadata, self.theirs = bytes.fromhex(other[0]), other[1]
        if self.peer is not None:
            self.nixl.remove_remote_agent(self.peer)
        self.peer_addresses.connecting("other", metadata, ("127.0.0.1", 0))
        self.peer_addresses.listens("other", [(bytes.fromhex(address), *socket) for address, *socket in other[2]])
        name = self.nixl.add_remote_agent(metadata)
        self.peer = name.decode() if isinstance(name, bytes) else name

    def write(self) -> None:
        mine = self.nixl.prep_xfer_dlist("", self.blocks(self.memory.ctypes.data))
        theirs = self.nixl.prep_xfer_dlist(self.peer, self.blocks(self.theirs))
        every = self.np.arange(SIZE // BLOCK)
        self.handle = self.nixl.make_prepped_xfer("WRITE", mine, every, theirs, every)
        self.nixl.transfer(self.handle)

    def wait_for_write(self, seconds: float) -> str:
        deadline, state = time.monotonic() + seconds, "PROC"
        while state == "PROC" and time.monotonic() < deadline:
            try:
                state = self.nixl.check_xfer_state(self.handle)
            except Exception:
                state = "ERR"
        return state

    def take_in(self, seconds: float, enough: int) -> int:
        """How many bytes have landed, after as long, or as soon as they are enough."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for _ in range(20):
                self.nixl.get_new_notifs()
            if 0 < enough <= self.landed():
                break
            time.sleep(0.001)
        return self.landed()

    def landed(self) -> int:
        return int(self.memory.sum())

    def clear(self) -> None:
        self.memory[:] = 0

    def tear_down(self) -> None:
        assert not self.peer_addresses.is_local("other")
        self.peer_addresses.tear_down("other")
        self.nixl.get_new_notifs()

    def has_ended(self) -> bool:
        return self.peer_addresses.has_ended("other")


if __name__ == "__main__":
    agent = Agent(sys.argv[1])
    print("answer", json.dumps(agent.about()), flush=True)
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        print("answer", json.dumps(getattr(agent, name)(*arguments)), flush=True)
