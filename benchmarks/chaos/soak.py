"""A mix of faults for a long time: no client may notice one, and processes that live throughout may not grow.

In the first third all faults are made. After that no fault kills one worker of each role, the frontends or Redis. In
the second half these and the launcher are measured between faults, while there are no requests: private memory (USS)
and open descriptors: a worker that was started shortly before the end of the first third has had time to warm up. The
median of the last quarter of the samples may exceed that of the first quarter by 2%. A worker that changes its role
needs other memory, so its samples begin again.

    make soak                                    # half an hour
    python -m benchmarks.chaos.soak --minutes 10
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import statistics
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.chaos.fleets import world
from benchmarks.chaos.load import Seen, as_json
from benchmarks.chaos.table import FAULTS
from benchmarks.chaos.world import World
from orchestrator.types import Role

ROOT = Path(__file__).parents[2]

GROWTH = 0.02
FEW = {"memory": 1 << 20, "descriptors": 2}  # bytes and descriptors: growth up to this is ignored
COURSE = 20  # samples of each process that are saved
SETTLE_S = 2.0  # then the connections of earlier clients are closed
SIMULATED = [name for name, fault in FAULTS.items() if "sim" in fault.engines]
# Faults that kill no measured process.
SPARING = [name for name in SIMULATED if name.startswith(("prefill_", "decode_"))]
SPARING += ["all_prefill_stopped", "queue_lost", "redis_emptied", "redis_read_only", "redis_without_replicas"]
SPARING += ["redis_out_of_memory", "run_folder_removed", "log_pipe_unread", "frontend_stopped"]
EVERYTHING = [*SPARING, "all_prefill_killed", "redis_killed", "redis_restarted_empty", "frontend_killed", "poison"]
EVERYTHING += [name for name in SIMULATED if name.startswith("operator_")]
EVERYTHING += ["pair_prefill_decode_killed", "pair_decode_redis_killed", "pair_frontend_prefill_killed"]


@dataclass
class Growth:
    """The samples of one process: bytes and descriptors."""

    name: str
    role: str  # empty if it is not a worker
    memory: list[int] = field(default_factory=list)
    descriptors: list[int] = field(default_factory=list)

    def change(self, kind: str) -> tuple[float, float]:
        """The medians of the first and of the last quarter of the samples."""
        values = getattr(self, kind)
        quarter = max(1, len(values) // 4)
        return statistics.median(values[:quarter]), statistics.median(values[-quarter:])

    def grown(self) -> list[str]:
        """What has grown, one line each."""
        grown = []
        for kind, few in FEW.items():
            before, after = self.change(kind)
            if after - before > max(few, GROWTH * before):
                grown.append(f"{self.name}: {kind} went from {before:,.0f} to {after:,.0f}")
        return grown


class Sampler:
    """Samples the launcher and its children. `spared`: pids of workers that no fault may kill."""

    def __init__(self, place: World) -> None:
        self._fleet = place.launched
        self._seen: dict[tuple[int, float], Growth] = {}
        self._samples = 0
        self.spared = {place.pids(role)[0] for role in Role}

    def sample(self) -> None:
        self._samples += 1
        launcher = psutil.Process(self._fleet.process.pid)
        roles = {int(worker["pid"]): str(worker["role"]) for worker in self._fleet.fleet()["workers"]}
        for process in [launcher, *launcher.children(recursive=True)]:
            try:
                with process.oneshot():
                    key = process.pid, process.create_time()
                    role = roles.get(process.pid, "")
                    growth = self._seen.get(key)
                    if growth is None or growth.role != role:
                        growth = self._seen[key] = Growth(_name(process), role)
                    growth.memory.append(process.memory_full_info().uss)
                    growth.descriptors.append(process.num_fds())
            except psutil.NoSuchProcess:
                continue  # killed, and not replaced yet

    def throughout(self) -> list[Growth]:
        """Processes with samples in one role for at least half of the time."""
        return [growth for growth in self._seen.values() if len(growth.memory) >= self._samples / 2]


def _name(process: psutil.Process) -> str:
    line = " ".join(process.cmdline()).split()  # of one that was forked the kernel shows one text
    for flag in ("--id", "--index"):
        if flag in line:
            value = line[line.index(flag) + 1]
            return value if flag == "--id" else f"frontend-{value}"
    return "launcher" if "up" in line else Path(line[0]).name if line else str(process.pid)


def _possible(names: list[str], place: World) -> list[str]:
    """The faults that have a victim. Workers change roles if a role has none left, so that all workers of a role may be
    spared: then the faults of the other role."""
    hit = [role.value for role in Role if set(place.pids(role)) - place.spared]
    return names if len(hit) == len(Role) else [name for name in names if name.startswith(tuple(hit))]


def soak(minutes: float, seed: int) -> tuple[Seen, dict[str, int], list[Growth], list[str]]:
    """Make faults for so long. Returns what clients saw, how often each fault was made, the samples, and failures."""
    seen, made, failures = Seen("soak"), defaultdict[str, int](int), list[str]()
    with world("frontends", real=False, seed=seed) as place:
        began, sampler = time.monotonic(), None
        while (elapsed_s := time.monotonic() - began) < minutes * 60:
            if sampler is None and elapsed_s > minutes * 20:
                sampler = Sampler(place)
                place.spared = sampler.spared
            name = place.random.choice(_possible(EVERYTHING if sampler is None else SPARING, place))
            made[name] += 1
            gaps = len(seen.gaps_s)
            try:
                asyncio.run(place.run(FAULTS[name], seen))
            except (RuntimeError, AssertionError) as error:
                failures.append(f"{name}: {type(error).__name__}: {error}"[:2000])
            longest_s = max(seen.gaps_s[gaps:], default=0.0)
            bound_s = FAULTS[name].gap_s
            if bound_s is not None and longest_s > bound_s:
                failures.append(f"{name}: a gap of {longest_s:.2f} s, at most {bound_s:g} s")
            print(f"{elapsed_s:5.0f} s {name}: longest gap {longest_s:.2f} s, {seen.errors.total()} errors", flush=True)
            if sampler is not None and elapsed_s > minutes * 30:
                time.sleep(SETTLE_S)
                sampler.sample()
    return seen, dict(made), sampler.throughout() if sampler is not None else [], failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as on Ctrl-C nothing is left running
    seen, made, measured, failures = soak(options.minutes, options.seed)
    failures += [f"{count} times {error}" for error, count in seen.errors.items()]
    failures += [f"{seen.wrong} wrong answers"] * bool(seen.wrong) + [f"{seen.leaks} leaks"] * bool(seen.leaks)
    failures += [line for growth in measured for line in growth.grown()]
    found: dict[str, Any] = {"minutes": options.minutes, "faults": made, "failures": failures, "processes": {}}
    found |= {name: value for name, value in as_json(seen).items() if not isinstance(value, list)}
    found["longest_gap_s"] = round(max(seen.gaps_s, default=0.0), 3)
    for growth in measured:
        memory, descriptors = growth.change("memory"), growth.change("descriptors")
        course = growth.memory[:: max(1, len(growth.memory) // COURSE)]  # tells a step from a slope
        found["processes"][growth.name] = {"uss_bytes": memory, "descriptors": descriptors, "course_bytes": course}
        name = f"{growth.name}, {growth.role}" if growth.role else growth.name
        print(f"{name}: {memory[0] / 2**20:.1f} to {memory[1] / 2**20:.1f} MiB, descriptors {descriptors}")
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "soak.json").write_text(json.dumps(found, indent=1) + "\n")
    print(f"{seen.answers} answers, {sum(made.values())} faults, {seen.errors.total()} errors, {seen.wrong} wrong")
    print("\n".join(failures) or "held", file=sys.stderr if failures else sys.stdout)
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
