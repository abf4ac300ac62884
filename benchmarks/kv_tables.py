"""The KV transfer figures as JSON, Markdown and a picture. As a script it joins several saved runs of `bench_kv.py`."""

from __future__ import annotations

import json
import platform
import statistics
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.tables import table

OURS, REFERENCE = "auto", "stock push, repaired"


class RunTimes(NamedTuple):
    """Of one request, seconds. What is exposed is `begun_s` and what decode's first step takes more than the next."""

    prefill_s: float  # submit to the end of prefill compute
    exposed_s: float
    decode_step_s: float
    begun_s: float | None = None  # from the end of prefill compute to decode's first step
    waited_s: float | None = None  # of that step: it waits for its core, on which others run


Turns = dict[str, list[RunTimes]]


@dataclass(frozen=True)
class Row:
    """Medians of one variant and prompt length; `turns`: the runs of each round, by its name."""

    model: str
    variant: str
    tokens: int
    bytes: int
    prefill_s: float  # submit to the end of prefill compute
    exposed_s: float
    decode_step_s: float
    prefill_best_s: float
    exposed_best_s: float
    raw_write_s: float
    runs: int
    rounds: int = 1  # how many pairs of engines had these runs
    turns: Turns = field(default_factory=dict)
    begun_s: float | None = None  # as of a run
    waited_s: float | None = None

    @classmethod
    def of(cls, model: str, variant: str, tokens: int, size: int, raw_write_s: float, turns: Turns) -> Row:
        every = [RunTimes(*run) for runs in turns.values() for run in runs]
        *columns, begun, waited = zip(*every, strict=True)
        middle = [statistics.median(column) for column in columns]
        best = [min(column) for column in columns[:2]]
        known = [[each for each in column if each is not None] for column in (begun, waited)]
        optional = [statistics.median(column) if column else None for column in known]
        figures: list[Any] = [*middle, *best, raw_write_s, len(every), len(turns), turns, *optional]
        return cls(model, variant, tokens, size, *figures)


def save(rows: list[Row], device: str, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    document = {"device": device, "python": platform.python_version(), "rows": [asdict(row) for row in rows]}
    (out / "bench_kv.json").write_text(json.dumps(document, indent=1) + "\n")
    (out / "kv.md").write_text(markdown(document))
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    models = sorted({row.model for row in rows})
    figure, axes = plt.subplots(1, len(models), figsize=(7 * len(models), 5), squeeze=False)
    for axis, model in zip(axes[0], models, strict=True):
        draw_exposed(axis, [asdict(row) for row in rows if row.model == model])
        axis.set(title=model)
    figure.suptitle(f"Time from the end of prefill to decode's first token, less one decode step ({device})")
    figure.tight_layout()
    figure.savefig(out / "bench_kv.png", dpi=120)
    print(f"saved {out / 'bench_kv.json'} and .png")


def draw_exposed(axis: Any, rows: list[dict[str, Any]]) -> None:
    """Plot exposed transfer by prompt length: a line for each variant, and one for a raw WRITE."""
    for variant in dict.fromkeys(row["variant"] for row in rows):
        line = [row for row in rows if row["variant"] == variant]
        axis.plot([r["tokens"] for r in line], [max(r["exposed_s"], 1e-4) * 1e3 for r in line], "o-", label=variant)
    sizes = {row["tokens"]: row["raw_write_s"] for row in rows}
    axis.plot(list(sizes), [seconds * 1e3 for seconds in sizes.values()], "k--", label="raw NIXL WRITE")
    axis.set(xlabel="prompt tokens", ylabel="exposed transfer, ms", xscale="log", yscale="log")
    axis.set_xticks(list(sizes), [f"{tokens:,}" for tokens in sizes], minor=False)
    axis.set_xticks([], minor=True)
    axis.legend(fontsize=8)


def markdown(document: dict[str, Any]) -> str:
    rows = document["rows"]
    parts = [
        "# KV transfer figures",
        "Made by `make bench-kv` (benchmarks/bench_kv.py) on "
        + document["device"]
        + ": prefill on one half of the cores, decode on the other, one request at a time, 256 tokens per engine step, "
        "medians, the best value in brackets. `repaired`: vLLM's connectors without the thread that spins a core while "
        "idle, and with the compute thread left where it was. `exposed` is decode's first token minus the end of "
        "prefill compute, less one decode step. Milliseconds; runs, and in brackets the pairs of engines they are of.",
    ]
    for model in dict.fromkeys(row["model"] for row in rows):
        mine = [row for row in rows if row["model"] == model]
        parts += [f"## {model}", *_ratios(mine), rows_table(mine)]
    return "\n\n".join(parts) + "\n"


def rows_table(rows: Iterable[dict[str, Any]]) -> str:
    return table(_HEAD, map(_cells, rows))


_HEAD = [
    "tokens",
    "MB",
    "variant",
    "runs",
    "prefill",
    "exposed",
    "before decode's first step",
    "that step waits for its core",
    "together",
    "decode step",
    "of a raw WRITE",
]


def _cells(row: dict[str, Any]) -> list[str]:
    return [
        str(row["tokens"]), f"{row['bytes'] / 1e6:.0f}", row["variant"], f"{row['runs']} ({row.get('rounds', 1)})",
        f"{row['prefill_s'] * 1e3:.0f} ({row['prefill_best_s'] * 1e3:.0f})",
        f"{row['exposed_s'] * 1e3:.1f} ({row['exposed_best_s'] * 1e3:.1f})",
        _known(row, "begun_s"), _known(row, "waited_s"),
        f"{(row['prefill_s'] + row['exposed_s']) * 1e3:.0f}", f"{row['decode_step_s'] * 1e3:.0f}",
        f"{row['exposed_s'] / row['raw_write_s']:.2f}",
    ]  # fmt: skip


def _ratios(rows: list[dict[str, Any]]) -> Iterable[str]:
    """Tables of ours against vLLM's connectors and against the other modes, by prompt length, of the turns that they
    have in common."""
    at = {(row["variant"], row["tokens"]): row for row in rows}
    against, modes = [], []
    for tokens in dict.fromkeys(row["tokens"] for row in rows):
        ours, push, pull, chunk, layer = (
            at.get((variant, tokens)) for variant in (OURS, REFERENCE, "stock pull, repaired", "chunk", "layer")
        )
        if both := _same_turns(ours, push):
            mine, other = both
            cells = [str(tokens), _ms(mine), f"{mine['exposed_s'] / other['exposed_s']:.2f}"]
            cells += [f"{mine['exposed_s'] / mine['raw_write_s']:.2f}", f"{_both(mine) / _both(other) - 1:+.1%}"]
            pulled = _same_turns(ours, pull)
            against.append([*cells, f"{_both(pulled[0]) / _both(pulled[1]) - 1:+.1%}" if pulled else ""])
        if found := _same_turns(ours, chunk, layer):
            mine, *others = found
            better_s = min(other["exposed_s"] for other in others)
            cells = [str(tokens), *map(_ms, found), f"{mine['exposed_s'] / others[0]['exposed_s']:.2f}"]
            cells += [
                f"{(mine['exposed_s'] - better_s) * 1e3:+.1f}",
                f"{mine['prefill_s'] / others[0]['prefill_s']:.3f}",
            ]
            modes.append(cells)
    if against:
        head = [
            "tokens",
            f"{OURS}: exposed",
            "/ repaired push's",
            "/ raw WRITE",
            "prefill + exposed against repaired push",
        ]
        yield table([*head, "against repaired pull"], against)
    if modes:
        head = [
            "tokens",
            f"exposed: {OURS}",
            "chunk",
            "layer",
            f"{OURS} / chunk",
            f"{OURS} less the better of the others",
        ]
        yield table([*head, f"prefill: {OURS} / chunk"], modes)


def _same_turns(*rows: dict[str, Any] | None) -> list[dict[str, Any]]:
    """These rows with nothing but the turns that all of them have; empty if there is none."""
    some = [Row(**row) for row in rows if row is not None]
    shared = [name for name in some[0].turns if all(name in row.turns for row in some)] if some else []
    if not shared or len(some) < len(rows):
        return []
    return [
        asdict(Row.of(r.model, r.variant, r.tokens, r.bytes, r.raw_write_s, {name: r.turns[name] for name in shared}))
        for r in some
    ]


def _ms(row: dict[str, Any]) -> str:
    return f"{row['exposed_s'] * 1e3:.1f}"


def _known(row: dict[str, Any], name: str) -> str:
    return "" if row.get(name) is None else f"{row[name] * 1e3:.1f}"


def _both(row: dict[str, Any]) -> float:
    return float(row["prefill_s"] + row["exposed_s"])


def joined(rows: Iterable[Row]) -> list[Row]:
    """A row for each case, of the turns of all its rows; where none has kept its turns, the last one as it is."""
    cases: dict[tuple[str, int, str], list[Row]] = {}
    for row in rows:
        cases.setdefault((row.model, row.tokens, row.variant), []).append(row)
    found = []
    for (model, tokens, variant), some in sorted(cases.items()):
        turns = {name: runs for row in some for name, runs in row.turns.items()}
        raw_write_s = statistics.median(row.raw_write_s for row in some)
        found.append(Row.of(model, variant, tokens, some[0].bytes, raw_write_s, turns) if turns else some[-1])
    return found


def main() -> None:
    """`python -m benchmarks.kv_tables RUN.json ...`: join their turns into one result."""
    documents = [json.loads(Path(name).read_text()) for name in sys.argv[1:]]
    rows = joined(Row(**row) for document in documents for row in document["rows"])
    save(rows, documents[0]["device"], Path(__file__).parent / "results")


if __name__ == "__main__":
    main()
