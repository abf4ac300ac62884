"""Makes faults in turns, and writes a table of what clients saw. The exit code is 1 if a row did not hold.

make chaos                                         # 20 runs of each fault, simulated engines: about two hours
python -m benchmarks.chaos --runs 2 --faults decode_killed_decoding redis_stopped_30_s
python -m benchmarks.chaos --engine real --runs 3
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
from collections.abc import Callable, Iterable
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from support_client import FleetFailed  # noqa: E402

from benchmarks.chaos.fleets import world  # noqa: E402
from benchmarks.chaos.load import Seen  # noqa: E402
from benchmarks.chaos.report import Row, save, saved, table  # noqa: E402
from benchmarks.chaos.reports import NotSeen  # noqa: E402
from benchmarks.chaos.table import BY_NAME, FAULTS  # noqa: E402
from benchmarks.chaos.world import Fault, World  # noqa: E402


def measure(
    faults: list[Fault],
    runs: int,
    real: bool,
    seed: int,
    starve_s: float = 60.0,
    begun: Iterable[Row] = (),
    note: Callable[[list[Row]], None] = lambda rows: None,
    minutes: float = math.inf,
) -> list[Row]:
    """Make faults that share a fleet in turns, until there are `runs` of each, including those of `begun`.

    `note` gets the rows after each round. After `minutes` no run begins. A fleet that this machine does not allow is
    left out.
    """
    engines = "real" if real else "simulated"
    known = {row.seen.fault: row for row in begun if row.engines == engines}
    rows = {fault.name: known.get(fault.name, Row(Seen(fault.name), engines, [])) for fault in faults}

    def found() -> list[Row]:
        return [row for row in rows.values() if row.seen.answers]

    deadline = time.monotonic() + minutes * 60
    for kind in dict.fromkeys(fault.fleet for fault in faults):
        mine = [fault for fault in faults if fault.fleet == kind and rows[fault.name].tries < runs]
        if not mine or time.monotonic() > deadline:
            continue
        try:
            with world(kind, real, seed + sum(rows[fault.name].tries for fault in mine)) as place:
                place.starve_s = starve_s
                while mine := [fault for fault in mine if rows[fault.name].tries < runs]:
                    for fault in mine:
                        if time.monotonic() < deadline:
                            _once(place, fault, rows[fault.name], runs)
                    note(found())
                    if time.monotonic() > deadline:
                        break
        except (OSError, subprocess.CalledProcessError) as error:
            why = getattr(error, "stderr", None) or error
            print(f"left out {', '.join(fault.name for fault in mine)}: {why}", file=sys.stderr)
    return found()


def _once(place: World, fault: Fault, row: Row, runs: int) -> None:
    before = len(row.seen.gaps_s)
    try:
        asyncio.run(place.run(fault, row.seen))
    except (NotSeen, FleetFailed, AssertionError) as error:
        row.failures.append(f"{type(error).__name__}: {error}"[:2000])
        print(error, file=sys.stderr)
    seen, gaps = row.seen, row.seen.gaps_s[before:]
    print(
        f"{row.tries}/{runs} {fault.name}: {seen.errors.total()} errors, {seen.wrong} wrong, {seen.leaks} leaks; "
        f"longest gap {max(gaps, default=0.0):.2f} s, healed in {seen.heal_s[-1] if seen.heal_s else -1:.1f} s",
        flush=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--faults", nargs="+", metavar="NAME", help="names or patterns such as 'redis_*'")
    parser.add_argument("--engine", choices=("sim", "real"), default="sim")
    parser.add_argument("--starve-minutes", type=float, default=1.0, help="how long cpu_starved lasts")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=math.inf, help="after that no run begins")
    parser.add_argument("--go-on", action="store_true", help="runs that --out has already count")
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
    rows = measure(chosen, options.runs, real, options.seed, starve_s, begun, note=lambda rows: save(rows, options.out))
    print(table(rows))
    for row in rows:
        for missed in row.missed():
            print(f"{row.seen.fault}: {missed}", file=sys.stderr)
    return int(any(row.missed() for row in rows))


if __name__ == "__main__":
    sys.exit(main())
