"""Makes faults in turns, and writes a table of what clients saw. The exit code is 1 if a row did not hold.

make chaos                                         # 20 runs of each fault, simulated engines: about two hours
python -m benchmarks.chaos --runs 2 --faults decode_killed_decoding redis_stopped_30_s
python -m benchmarks.chaos --engine real --runs 3
make chaos-real                                    # real engines, every fault: three hours or 60,000 answers, resumable
"""

from __future__ import annotations

import argparse
import asyncio
import fnmatch
import math
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from support_client import FleetFailed

from benchmarks.chaos.fleets import world
from benchmarks.chaos.load import Seen
from benchmarks.chaos.report import Row, save, saved, table
from benchmarks.chaos.reports import NotSeen
from benchmarks.chaos.table import BY_NAME, FAULTS
from benchmarks.chaos.world import Fault, World

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Budget:
    """When no further run begins. What `--go-on` finds in `--out` counts. `turn`: runs of each fault on one fleet,
    before another kind of fleet has its turn."""

    runs: float = math.inf  # of each fault
    minutes: float = math.inf
    answers: float = math.inf
    turn: float = math.inf

    def is_spent(self, rows: Iterable[Row]) -> bool:
        rows = list(rows)
        spent_s, answers = sum(row.spent_s for row in rows), sum(row.seen.answers for row in rows)
        return spent_s >= self.minutes * 60 or answers >= self.answers

    def targets(self) -> Iterator[float]:
        """The runs of each fault after each turn."""
        target = 0.0
        while target < self.runs:
            target = min(target + self.turn, self.runs)
            yield target


def measure(
    faults: list[Fault],
    real: bool,
    seed: int,
    budget: Budget,
    starve_s: float = 60.0,
    begun: Iterable[Row] = (),
    note: Callable[[list[Row]], None] = lambda rows: None,
) -> list[Row]:
    """Make faults that share a fleet in turns, until the budget is spent. `begun`: rows of earlier runs.

    `note` gets the rows after each run. A fleet that this machine does not allow is left out. One that does not start
    or heal counts as a failure, and the rest of the turn has another.
    """
    engines = "real" if real else "simulated"
    known = {row.seen.fault: row for row in begun if row.engines == engines}
    rows = {fault.name: known.get(fault.name, Row(Seen(fault.name), engines, [])) for fault in faults}
    left_out = set[str]()

    def due(kind: str, target: float) -> list[Fault]:
        if kind in left_out or budget.is_spent(rows.values()):
            return []
        return [fault for fault in faults if fault.fleet == kind and rows[fault.name].tries < target]

    def take_turn(place: World, kind: str, target: float, began: float) -> None:
        """Runs on one fleet, until all are made, the budget is spent, or the fleet does not heal."""
        while mine := due(kind, target):
            for fault in mine:
                if budget.is_spent(rows.values()):
                    return
                healed = _once(place, fault, rows[fault.name], budget.runs, began)
                began = time.monotonic()
                note(found(rows.values()))
                if not healed:
                    return

    for target in budget.targets():
        for kind in dict.fromkeys(fault.fleet for fault in faults):
            while mine := due(kind, target):
                began = time.monotonic()
                first = rows[mine[0].name]
                try:
                    with world(kind, real, seed + sum(rows[fault.name].tries for fault in mine)) as place:
                        place.starve_s = starve_s
                        take_turn(place, kind, target, began)
                except (FleetFailed, AssertionError) as error:  # it did not start, or did not answer when calm
                    _failed(first, error)
                    first.spent_s += time.monotonic() - began
                    note(found(rows.values()))
                except (OSError, subprocess.CalledProcessError) as error:
                    why = getattr(error, "stderr", None) or error
                    print(f"left out {', '.join(fault.name for fault in mine)}: {why}", file=sys.stderr)
                    left_out.add(kind)
        if budget.is_spent(rows.values()):
            break
    return found(rows.values())


def found(rows: Iterable[Row]) -> list[Row]:
    """Those with a run."""
    return [row for row in rows if row.seen.answers or row.failures]


def _failed(row: Row, error: Exception) -> None:
    row.failures.append(f"{type(error).__name__}: {error}"[:2000])
    print(error, file=sys.stderr)


def _once(place: World, fault: Fault, row: Row, runs: float, began: float) -> bool:
    """One run. `began`: monotonic seconds from which its time counts. Returns False if the fleet does not heal."""
    before, queued, healed = len(row.seen.gaps_s), len(row.seen.queued_s), True
    try:
        asyncio.run(place.run(fault, row.seen))
    except (NotSeen, FleetFailed, AssertionError) as error:
        healed = not isinstance(error, FleetFailed)
        _failed(row, error)
    seen, gaps = row.seen, row.seen.gaps_s[before:]
    row.spent_s += time.monotonic() - began
    print(
        f"{row.tries}/{runs:g} {fault.name}: {seen.errors.total()} errors, {seen.wrong} wrong, {seen.leaks} leaks; "
        f"longest gap {max(gaps, default=0.0):.2f} s, in the queue {max(seen.queued_s[queued:], default=0.0):.2f} s, "
        f"healed in {seen.heal_s[-1] if seen.heal_s else -1:.1f} s",
        flush=True,
    )
    return healed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--faults", nargs="+", metavar="NAME", help="names or patterns such as 'redis_*'")
    parser.add_argument("--engine", choices=("sim", "real"), default="sim")
    parser.add_argument("--starve-minutes", type=float, default=1.0, help="how long cpu_starved lasts")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=math.inf, help="after that no run begins")
    parser.add_argument("--answers", type=float, default=math.inf, help="after so many no run begins")
    parser.add_argument("--turn", type=int, help="runs of each fault on one fleet before the next kind of fleet")
    parser.add_argument("--go-on", action="store_true", help="runs, minutes and answers that --out has count")
    parser.add_argument("--list", action="store_true", help="print the names and end")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as on Ctrl-C nothing is left running
    real = options.engine == "real"
    patterns = options.faults or [name for name in FAULTS if name not in BY_NAME]
    chosen = [fault for name, fault in FAULTS.items() if any(fnmatch.fnmatch(name, pattern) for pattern in patterns)]
    if options.list or not chosen:
        print("\n".join(FAULTS))
        return 0 if options.list else 2
    left_out = [fault.name for fault in chosen if options.engine not in fault.engines]
    if left_out:
        print(f"left out with --engine {options.engine}: {', '.join(left_out)}", file=sys.stderr)
    chosen = [fault for fault in chosen if options.engine in fault.engines]
    if not chosen:
        return 2
    begun = saved(options.out) if options.go_on else []
    starve_s = options.starve_minutes * 60
    budget = Budget(options.runs, options.minutes, options.answers, options.turn or options.runs)
    rows = measure(chosen, real, options.seed, budget, starve_s, begun, note=lambda rows: save(rows, options.out))
    print(table(rows))
    spent_h, answers = sum(row.spent_s for row in rows) / 3600, sum(row.seen.answers for row in rows)
    print(f"{answers} answers in {spent_h:.2f} hours")
    for row in rows:
        for missed in row.missed():
            print(f"{row.seen.fault}: {missed}", file=sys.stderr)
    return int(any(row.missed() for row in rows))


if __name__ == "__main__":
    sys.exit(main())
