"""The results as a table and as figures, and whether each row held."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import tables
from benchmarks.chaos.load import Seen, as_json
from benchmarks.chaos.table import FAULTS

_HEAD: tuple[str, ...] = ("fault", "engines", "runs", "answers", "errors", "wrong", "longest gap P50", "P99", "max")
_HEAD += ("bound (s)", "heals in P50", "max (s)", "work gone in max (s)", "leaks", "held")
_FIGURES = "chaos.json"
NOTE = """\
Made by `make chaos`. Eight clients (ten for the poison) stream without end while the fault happens; every answer is
compared with an undisturbed one, token by token. A gap is the longest silence within an answer, the wait for its first
token included. `errors` are those that clients saw; of a frontend or launcher that was killed its own connections are
not counted. `heals in`: from the fault, its duration included, until the fleet had its shape again. `leaks`: runs after
which a KV block, a job or a request was still held.
"""


@dataclass
class Row:
    seen: Seen
    engines: str  # "simulated" or "real"
    failures: list[str]  # errors of runs that did not complete
    spent_s: float = 0.0  # on all runs, the starts of their fleets included

    @property
    def tries(self) -> int:
        return self.seen.runs + len(self.failures)

    def missed(self) -> list[str]:
        """What did not hold; empty if everything did."""
        seen, fault = self.seen, FAULTS[self.seen.fault]
        missed = [f"{count} times {error}" for error, count in seen.errors.items()] + self.failures
        missed += [f"{seen.wrong} wrong answers"] if seen.wrong else []
        missed += [f"{seen.leaks} leaks"] if seen.leaks else []
        missed += [f"{seen.false_losses} workers were taken for dead"] if seen.false_losses else []
        if fault.gap_s is not None and max(seen.gaps_s, default=0.0) > fault.gap_s:
            queued_s = max(seen.queued_s, default=0.0)  # fewer workers, or the load's own bursts
            missed.append(
                f"a gap of {max(seen.gaps_s):.2f} s, at most {fault.gap_s:g} s; the longest wait in the prefill queue "
                f"was {queued_s:.2f} s"
            )
        if fault.gone_s is not None and max(seen.gone_s, default=0.0) > fault.gone_s:
            missed.append(f"work gone after {max(seen.gone_s):.2f} s, at most {fault.gone_s:g} s")
        return missed

    def cells(self) -> list[str]:
        seen, fault = self.seen, FAULTS[self.seen.fault]
        counts = [seen.runs, seen.answers, seen.errors.total(), seen.wrong]
        gaps = [_seconds(seen.gaps_s, at) for at in (0.5, 0.99, 1.0)]
        bound = "-" if fault.gap_s is None else f"{fault.gap_s:g}"
        heals = [_seconds(seen.heal_s, at) for at in (0.5, 1.0)]
        held = "yes" if not self.missed() else "no"
        return [
            seen.fault,
            self.engines,
            *map(str, counts),
            *gaps,
            bound,
            *heals,
            _seconds(seen.gone_s, 1.0),
            str(seen.leaks),
            held,
        ]


def _seconds(values: list[float], share: float) -> str:
    """The value that this share of them does not exceed."""
    ordered = sorted(values)
    return f"{ordered[int(share * (len(ordered) - 1))]:.2f}" if ordered else "-"


def table(rows: Iterable[Row]) -> str:
    return tables.table(_HEAD, (row.cells() for row in rows))


def save(rows: Iterable[Row], folder: Path) -> None:
    """Write chaos.md and chaos.json. Rows that were saved before stay, unless these replace them."""
    folder.mkdir(parents=True, exist_ok=True)
    known = {(row.seen.fault, row.engines): row for row in saved(folder)}
    known |= {(row.seen.fault, row.engines): row for row in rows}
    order = list(FAULTS)
    kept = [known[key] for key in sorted(known, key=lambda key: (key[1] == "real", order.index(key[0])))]
    lines = ",\n".join(json.dumps(_as_json(row)) for row in kept)
    (folder / _FIGURES).write_text(f"[\n{lines}\n]\n")
    (folder / "chaos.md").write_text(f"# Faults under load\n\n{NOTE}\n{table(kept)}\n")


def saved(folder: Path) -> list[Row]:
    """The rows that `save` wrote to this folder."""
    figures = folder / _FIGURES
    return [_from_json(row) for row in json.loads(figures.read_text())] if figures.exists() else []


def _as_json(row: Row) -> dict[str, Any]:
    figures = as_json(row.seen)
    rounded = {
        name: [round(x, 3) for x in value] if isinstance(value, list) else value for name, value in figures.items()
    }
    return {**rounded, "engines": row.engines, "failures": row.failures, "spent_s": round(row.spent_s, 1)}


def _from_json(row: dict[str, Any]) -> Row:
    row = dict(row)
    engines, failures, spent_s = row.pop("engines"), row.pop("failures"), row.pop("spent_s", 0.0)
    seen = Seen(**row)
    seen.errors = type(Seen("").errors)(seen.errors)
    return Row(seen, engines, failures, spent_s)
