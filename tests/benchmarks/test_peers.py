"""`benchmarks.peers`: processes that end, answer or hang, a peer that cannot run, and the tables."""

import json
import signal
import sys
import time

import psutil
import pytest

from benchmarks.peers import __main__ as peers
from benchmarks.peers.environments import PeerError
from benchmarks.peers.processes import running
from benchmarks.peers.report import write
from benchmarks.peers.systems import Model, Serving, System
from orchestrator.simulator.real.client import Timing
from orchestrator.simulator.real.drive import Run, Sent
from orchestrator.wire.addresses import free_ports

FIGURES = {"requests_per_s": 10.0, "ttft_p50_s": 0.02, "ttft_p99_s": 0.04, "tpot_p50_s": 0.01, "cpu_s": 0.05}


def test_a_program_that_ends_is_named_with_its_last_words(tmp_path):
    with running(tmp_path) as processes:
        processes.start("broken", [sys.executable, "-c", "print('no such flag'); raise SystemExit(3)"])
        with pytest.raises(PeerError, match=r"broken ended with 3: no such flag"):
            processes.wait("http://127.0.0.1:9/", timeout_s=30)


def test_started_process_is_awaited_measured_and_stopped(tmp_path):
    port = next(free_ports("127.0.0.1"))
    with running(tmp_path) as processes:
        processes.start("server", [sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1"])
        processes.wait(f"http://127.0.0.1:{port}/", words="Directory listing", timeout_s=30)
        assert processes.cpu_s("server", "http.server") > 0 and processes.cpu_s() > 0
        assert processes.cpu_s("server", "another program") == 0
    with running(tmp_path) as processes, pytest.raises(PeerError, match="did not answer within"):
        processes.wait(f"http://127.0.0.1:{port}/", timeout_s=0.5)


def test_a_second_signal_while_programs_stop_leaves_none(tmp_path):
    """It comes while the benchmark waits for a program that ignores SIGTERM."""
    ignores = "import os, signal, time; signal.signal(15, signal.SIG_IGN); print(os.getpid(), flush=True)"
    before = signal.signal(signal.SIGALRM, lambda *_: sys.exit(143))
    try:
        with pytest.raises(SystemExit), running(tmp_path) as processes:
            processes.start("server", [sys.executable, "-c", f"{ignores}; time.sleep(60)"])
            deadline = time.monotonic() + 30
            while not (said := (tmp_path / "server.log").read_text()).endswith("\n") and time.monotonic() < deadline:
                time.sleep(0.01)
            program = psutil.Process(int(said))
            signal.setitimer(signal.ITIMER_REAL, 0.3)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert not program.is_running()


def test_a_peer_that_cannot_run_is_left_out_and_the_others_take_turns(tmp_path):
    begun: list[str] = []

    def cannot(processes, model):
        begun.append("peer")
        raise PeerError("peer: pip\ncannot install it")

    def can(processes, model):
        begun.append("ours")
        return Serving("http://127.0.0.1:9", ("ours", ""))

    async def measure(system, serving, processes):
        assert (system.name, serving.url) == ("ours", "http://127.0.0.1:9")

    systems = [System("peer", "", cannot), System("ours", "", can)]
    turns = peers.Turns(systems, Model("m"), rounds=3, logs=tmp_path)
    turns.run(measure)
    assert begun == ["peer", "ours", "ours", "ours"]
    assert turns.failed == {"peer": "peer: pip cannot install it"}


def test_a_later_call_goes_on_from_the_turns_that_are_saved(tmp_path):
    saved = {"ours": {"8": [{"turn": 1, "cpu_s": 0.1}, {"turn": 2, "cpu_s": 0.2}]}}
    system = System("ours", "", lambda processes, model: Serving("http://127.0.0.1:9", ("ours", "")))
    turns = peers.Turns([system], Model("m"), rounds=1, logs=tmp_path, runs=saved)

    async def measure(system, serving, processes):
        turns.keep(system, 8, {"cpu_s": 0.3})

    turns.run(measure)
    assert turns.found()["systems"]["ours"]["8"][2] == {"turn": 3, "cpu_s": 0.3}


@pytest.mark.slow
def test_tables_have_ratios_and_name_missing_systems(tmp_path):
    pytest.importorskip("matplotlib")
    half = {key: value * 2 for key, value in FIGURES.items()} | {"requests_per_s": 5.0}
    turns = [{"turn": turn, **FIGURES} for turn in (1, 2)]
    again = [{"turn": 1, **half}, {"turn": 2, **half, "requests_per_s": 4.0}]
    systems = {"orchestrator": {8: turns}, "smg": {8: again}, "two aggregated": {8: again[:1]}}
    serving = {"prompt_tokens": 2048, "systems": systems, "failed": {"one vLLM": "it ended"}}
    write({"versions": {"smg": "1"}, "serving": serving}, tmp_path)
    text = (tmp_path / "peers.md").read_text()
    of_turns = "2.25 (2.00 to 2.50) | 0.50 (0.50 to 0.50) | 0.50 (0.50 to 0.50)"
    assert f"| smg | 8 | 2 | 4.5 | 40.0 | 80.0 | 20.0 | 100 | {of_turns} |" in text
    assert "| two aggregated | 8 | 1 | 5.0 | 40.0 | 80.0 | 20.0 | 100 | 2.00* | 0.50* | 0.50* |" in text
    assert "- one vLLM: not measured. it ended" in text and "2,048 prompt and 64 output tokens" in text
    assert json.loads((tmp_path / "peers.json").read_text())["serving"]["systems"]["orchestrator"]["8"] == turns
    assert (tmp_path / "peers.png").stat().st_size > 1000


def test_one_in_four_of_the_mixed_load_is_a_document():
    load = peers.chats_and_documents(rate=10.0, seconds=40.0)
    documents = sum(arrival.prompt_tokens == peers.DOCUMENT[0] for arrival in load.arrivals)
    assert load.rate == pytest.approx(10.0, rel=0.2)
    assert documents == pytest.approx(len(load.arrivals) / 4, abs=1)


def test_the_mixed_load_tells_chats_from_documents_and_names_what_was_not_answered(tmp_path):
    def answered(prompt_tokens: int, gap_s: float) -> Sent:
        timing = Timing(prompt_tokens, 3, ttft_s=0.1, tpot_s=gap_s, gaps_s=[gap_s, gap_s])
        return Sent(0.0, timing)

    def run(chat_gap_s: float) -> Run:
        sent = [answered(peers.CHAT[0] + 2, chat_gap_s), answered(peers.DOCUMENT[0] + 2, 0.9)]
        return Run("u", "l", [*sent, Sent(0.0, None, "answered 503")], 2.0, 0.1)

    systems = {
        name: {0.5: [{"turn": 1, **peers._of_mixed(run(gap))}]}
        for name, gap in (("orchestrator", 0.02), ("two aggregated", 0.08))
    }
    assert systems["orchestrator"][0.5][0]["chat_itl_p99_s"] == 0.02  # documents' gaps are not among them
    mixed = {"objectives": peers.OBJECTIVES, "systems": systems, "failed": {}}
    write({"versions": {}, "mixed": mixed}, tmp_path)
    text = (tmp_path / "peers.md").read_text()
    assert "| orchestrator | 0.5 | 1 | 20.0 | 20.0 | 0.10 | 0.10 | 1 | 0.50 |  |  |" in text
    assert "| two aggregated | 0.5 | 1 | 80.0 | 80.0 | 0.10 | 0.10 | 1 | 0.50 | 0.25* | 1.00* |" in text
