"""The KV transfer figures as JSON, Markdown and a picture. As a script it joins several saved runs of `bench_kv.py`."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

REFERENCE = "stock push, repaired"


@dataclass(frozen=True)
class Row:
    """Medians of one variant and prompt length."""

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


_HEAD = ["tokens", "MB", "variant", "runs", "prefill", "exposed", "together", "decode step", "of a raw WRITE"]


def _cells(row: dict[str, Any]) -> list[str]:
    return [
        str(row["tokens"]), f"{row['bytes'] / 1e6:.0f}", row["variant"], f"{row['runs']} ({row.get('rounds', 1)})",
        f"{row['prefill_s'] * 1e3:.0f} ({row['prefill_best_s'] * 1e3:.0f})",
        f"{row['exposed_s'] * 1e3:.1f} ({row['exposed_best_s'] * 1e3:.1f})",
        f"{(row['prefill_s'] + row['exposed_s']) * 1e3:.0f}", f"{row['decode_step_s'] * 1e3:.0f}",
        f"{row['exposed_s'] / row['raw_write_s']:.2f}",
    ]  # fmt: skip


def _ratios(rows: list[dict[str, Any]]) -> Iterable[str]:
    """A table of `chunk` against vLLM's connectors, by prompt length."""
    at = {(row["variant"], row["tokens"]): row for row in rows}
    lines = []
    for (variant, tokens), ours in at.items():
        theirs, pull = at.get((REFERENCE, tokens)), at.get(("stock pull, repaired", tokens))
        if variant != "chunk" or theirs is None or pull is None:
            continue
        lines.append(
            [
                str(tokens), f"{ours['exposed_s'] * 1e3:.1f}", f"{ours['exposed_s'] / theirs['exposed_s']:.2f}",
                f"{ours['exposed_s'] / ours['raw_write_s']:.2f}",
                f"{_both(ours) / _both(theirs) - 1:+.1%}", f"{_both(ours) / _both(pull) - 1:+.1%}",
            ]
        )  # fmt: skip
    if lines:
        head = [
            "tokens",
            "chunk: exposed",
            "/ repaired push's",
            "/ raw WRITE",
            "prefill + exposed against repaired push",
        ]
        yield table([*head, "against repaired pull"], lines)


def _both(row: dict[str, Any]) -> float:
    return float(row["prefill_s"] + row["exposed_s"])


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(header)
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> None:
    """`kv_tables.py RUN.json ...`: join their rows into one result. A later run replaces rows of an earlier one."""
    documents = [json.loads(Path(name).read_text()) for name in sys.argv[1:]]
    rows = {(r["model"], r["tokens"], r["variant"]): Row(**r) for document in documents for r in document["rows"]}
    joined = sorted(rows.values(), key=lambda row: (row.model, row.tokens))
    save(joined, documents[0]["device"], Path(__file__).parent / "results")


if __name__ == "__main__":
    main()
