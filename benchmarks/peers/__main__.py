"""`make bench-peers`: this project and its peers on this machine, in turns. Each system is started again for each turn.

Three parts. `serving`: one prefill and one decode engine behind each router, and vLLM without a router. Every engine
has the demo model's architecture cut to two narrow layers, so that the comparison is of everything but the model.
`mixed`: the whole demo model, with short chats that decode while long documents are prefilled, against two aggregated
engines. `frontend`: CPU time of the frontend process alone, over simulated engines. A peer that cannot run is reported,
and the others are measured.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.peers.environments import PEERS, PeerError
from benchmarks.peers.processes import Processes, running
from benchmarks.peers.report import write
from benchmarks.peers.systems import FRONTENDS, MIXED, OBJECTIVES, SYSTEMS, Model, Serving, System, ours
from benchmarks.peers.texts import Texts
from orchestrator.config.model import resolve_model
from orchestrator.simulator.real.client import MeasureError, Target
from orchestrator.simulator.real.drive import Run, closed_loop, open_loop
from orchestrator.simulator.real.figures import figures
from orchestrator.simulator.report import percentile
from orchestrator.simulator.trace import Arrival, Load, steady

RESULTS = Path(__file__).parents[1] / "results"
COMMON = {"dtype": "float32", "enforce_eager": True, "kv_cache_memory_bytes": 1 << 29, "max_model_len": 4096}
# The demo model's tokenizer and architecture with two narrow layers, so that the model itself costs little.
TINY = {"num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2}
PROMPT_TOKENS, OUTPUT_TOKENS, USERS = 512, 64, (1, 8, 32)
# Prompt and output tokens of the mixed load.
CHAT, DOCUMENT = (48, 160), (1800, 8)

# By system and case, the figures of each turn, its number among them; cases are text, as in a saved file.
Runs = dict[str, dict[str, list[dict[str, float]]]]
Note = Callable[[dict[str, Any]], None]  # takes what a part has found so far


def say(text: str) -> None:
    print(text, flush=True)


class Turns:
    """Measures systems in turns. One that failed is left out of later rounds. `runs`: those of earlier calls, which
    these go on from."""

    def __init__(
        self, systems: Sequence[System], model: Model, rounds: int, logs: Path, runs: Runs | None = None
    ) -> None:
        self.systems, self._model, self._rounds, self._logs = list(systems), model, rounds, logs
        self.runs: Runs = runs or {}
        self.failed: dict[str, str] = {}
        saved = (run["turn"] for cases in self.runs.values() for runs in cases.values() for run in runs)
        self._turn = int(max(saved, default=0))

    def run(self, measure: Any, note: Callable[[], None] = lambda: None) -> None:
        """Call `measure(system, serving, processes)`, a coroutine function, once for each system and round. Call
        `note()` after each, so that a long run that is broken off has results."""
        for number in range(self._rounds):
            self._turn += 1
            # Each round begins with another system, in case the first one has an advantage.
            shift = (self._turn - 1) % len(self.systems)
            for system in self.systems[shift:] + self.systems[:shift]:
                if system.name in self.failed:
                    continue
                began = time.monotonic()
                try:
                    with running(self._logs / f"{system.name.replace(', ', '-').replace(' ', '-')}") as processes:
                        serving = system.start(processes, self._model)
                        asyncio.run(measure(system, serving, processes))
                    say(f"round {number + 1} of {self._rounds}, {system.name}: {time.monotonic() - began:.0f} s")
                except (PeerError, MeasureError) as error:
                    self.failed[system.name] = " ".join(str(error).split())
                    say(f"{system.name}: {self.failed[system.name]}")
                note()

    def keep(self, system: System, case: float, figures: dict[str, float]) -> None:
        """From `measure`: what it has found for one case."""
        runs = self.runs.setdefault(system.name, {}).setdefault(str(case), [])
        runs.append({"turn": self._turn, **figures})

    def found(self) -> dict[str, Any]:
        return {"systems": self.runs, "failed": self.failed}


async def warm_up(target: Target, prompts: Texts, tokens: int) -> None:
    """Connect, and let the engines compile and allocate. Raises MeasureError if a request is not answered."""
    for _ in range(3):
        await target.complete(prompts.make(tokens), 8)
    await asyncio.gather(*(target.complete(prompts.make(64), 8) for _ in range(8)))


def serving(options: argparse.Namespace, model: Model, logs: Path, note: Note, runs: Runs) -> None:
    """By system and number of users: requests/s, TTFT, TPOT, and CPU time of all processes and of the front one."""
    systems = [system for system in SYSTEMS if system.name in options.systems]
    if options.against:
        systems.append(
            System("before", f"this project as in {options.against.name}", partial(ours, root=options.against))
        )
    turns = Turns(systems, model, options.rounds, logs, runs)

    async def measure(system: System, there: Serving, processes: Processes) -> None:
        prompts = Texts(model.path, seed=int.from_bytes(os.urandom(4)))
        async with Target(there.url) as target:
            await warm_up(target, prompts, options.prompt_tokens)
            for users in options.users:
                requests = max(24, options.requests_per_user * users)
                load = steady(requests, options.prompt_tokens, OUTPUT_TOKENS)
                before = processes.cpu_s(), processes.cpu_s(*there.front)
                run = await closed_loop(target, load, users, prompts)
                used = processes.cpu_s() - before[0], processes.cpu_s(*there.front) - before[1]
                seen = figures(run, **OBJECTIVES)
                if seen.errors:
                    reason = next(iter(seen.reasons), "no reason")
                    raise PeerError(f"{system.name}: {seen.errors} of {requests} requests failed: {reason}")
                found = {
                    "requests_per_s": seen.requests_per_s,
                    "ttft_p50_s": seen.ttft.p50,
                    "ttft_p99_s": seen.ttft.p99,
                    "tpot_p50_s": seen.tpot.p50,
                    "itl_p99_s": seen.itl.p99,
                    "cpu_s": used[0] / requests,
                    "front_cpu_s": used[1] / requests,
                }
                turns.keep(system, users, found)

    turns.run(measure, lambda: note({"prompt_tokens": options.prompt_tokens} | turns.found()))


def mixed(options: argparse.Namespace, model: Model, logs: Path, note: Note, runs: Runs) -> None:
    """By system and rate: ITL of the chats, TTFT of both, and goodput."""
    turns = Turns([each for each in MIXED if each.name in options.systems], model, options.rounds, logs, runs)

    async def measure(system: System, there: Serving, processes: Processes) -> None:
        prompts = Texts(model.path, seed=int.from_bytes(os.urandom(4)))
        async with Target(there.url) as target:
            await warm_up(target, prompts, DOCUMENT[0])
            for rate in options.rates:
                run = await open_loop(target, chats_and_documents(rate, options.seconds), prompts)
                turns.keep(system, rate, _of_mixed(run))

    turns.run(measure, lambda: note({"objectives": OBJECTIVES} | turns.found()))


def chats_and_documents(rate: float, seconds: float) -> Load:
    """Three chats for each document, at random times, with `rate` requests per second in all."""
    rng = random.Random(1)
    arrivals: list[Arrival] = []
    at = 0.0
    while (at := at + rng.expovariate(rate)) < seconds:
        arrivals.append(Arrival(at, *(CHAT if len(arrivals) % 4 else DOCUMENT)))
    return Load("chats and documents", arrivals)


def _of_mixed(run: Run) -> dict[str, float]:
    seen = figures(run, **OBJECTIVES)
    answered = [sent.timing for sent in run.sent if sent.timing is not None]
    chats = [timing for timing in answered if timing.prompt_tokens < DOCUMENT[0] / 2]
    documents = [timing for timing in answered if timing.prompt_tokens >= DOCUMENT[0] / 2]
    gaps = sorted(gap for timing in chats for gap in timing.gaps_s)
    return {
        "errors": seen.errors,
        "chat_itl_p50_s": percentile(gaps, 0.5),
        "chat_itl_p99_s": percentile(gaps, 0.99),
        "chat_ttft_p99_s": percentile(sorted(timing.ttft_s for timing in chats), 0.99),
        "document_ttft_p99_s": percentile(sorted(timing.ttft_s for timing in documents), 0.99),
        "attained": seen.attained,
        "goodput": seen.goodput,
    }


def frontend(options: argparse.Namespace, model: Model, logs: Path, note: Note, runs: Runs) -> None:
    """By system and prompt length: CPU seconds of the frontend process for a streamed answer of 64 tokens, and
    requests/s."""
    turns = Turns(FRONTENDS, model, options.rounds, logs, runs)

    async def measure(system: System, there: Serving, processes: Processes) -> None:
        prompts = Texts(model.path, seed=int.from_bytes(os.urandom(4)))
        async with Target(there.url) as target:
            await warm_up(target, prompts, 1024)
            for tokens in (32, 1024):
                load = steady(options.frontend_requests, tokens, OUTPUT_TOKENS)
                before = processes.cpu_s(*there.front)
                run = await closed_loop(target, load, 16, prompts)
                used = processes.cpu_s(*there.front) - before
                if failed := [sent.error for sent in run.sent if sent.error]:
                    raise PeerError(f"{system.name}: {len(failed)} requests failed: {failed[0]}")
                cpu_s, rate = used / options.frontend_requests, len(run.sent) / run.span_s
                turns.keep(system, tokens, {"cpu_s": cpu_s, "requests_per_s": rate})

    turns.run(measure, lambda: note(turns.found()))


PARTS = {"serving": serving, "mixed": mixed, "frontend": frontend}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = list(dict.fromkeys(system.name for system in SYSTEMS + MIXED))
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--systems", nargs="+", choices=names, default=names, help="of the first two parts")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each system; figures are medians over them")
    parser.add_argument("--go-on", action="store_true", help="add turns to those that are saved")
    parser.add_argument("--users", nargs="+", type=int, default=list(USERS), help="of the serving part")
    parser.add_argument("--prompt-tokens", type=int, default=PROMPT_TOKENS, help="of the serving part")
    parser.add_argument("--against", type=Path, help="a checkout of this project to compare with, in the serving part")
    parser.add_argument("--requests-per-user", type=int, default=6, help="of the serving part, at least 24 in all")
    parser.add_argument("--rates", nargs="+", type=float, default=[0.5, 1.0, 1.5], help="requests/s, of the mixed part")
    parser.add_argument("--seconds", type=float, default=30.0, help="of each run of the mixed part")
    parser.add_argument("--frontend-requests", type=int, default=150, help="of each run of the frontend part")
    parser.add_argument("--logs", type=Path, help="keep what the programs print here")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of peers.json, peers.md and peers.png")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as on Ctrl-C nothing is left running
    demo = resolve_model("demo")
    tiny = Model(demo, COMMON | {"hf_overrides": TINY, "load_format": "dummy"})
    models = {"serving": tiny, "mixed": Model(demo, COMMON), "frontend": Model(demo)}
    path = options.out / "peers.json"
    everything = json.loads(path.read_text()) if path.exists() else {}
    everything["versions"] = {name: peer.version for name, peer in PEERS.items()}
    with contextlib.ExitStack() as stack:
        logs = options.logs or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="peers-")))
        for part in options.parts:

            def note(found: dict[str, Any], part: str = part) -> None:
                write(everything | {part: found}, options.out)
                everything[part] = found

            saved = everything.get(part, {}).get("systems", {}) if options.go_on else {}
            PARTS[part](options, models[part], logs, note, saved)
    say(f"wrote {options.out / 'peers.md'}")


if __name__ == "__main__":
    main()
