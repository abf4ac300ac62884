"""The results of `benchmarks.gpu` as JSON, Markdown and a picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.kv_tables import draw_exposed, rows_table
from benchmarks.kv_threads import HEAD, lines
from benchmarks.tables import table

Result = dict[str, Any]


def save(results: Result, out: Path, name: str) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.json").write_text(json.dumps(results, indent=1) + "\n")
    (out / f"{name}.md").write_text(markdown(results))
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(14, 5))
    if found := results.get("kv") or results.get("auto"):
        draw_exposed(left, found["rows"])
    if "gaps" in results:
        for at, who in enumerate(("one engine", "prefill and decode")):
            values = [results["gaps"][who][f"{key}_ms"] for key in ("p50", "p99", "max")]
            right.bar([index + 0.4 * at for index in range(3)], values, width=0.4, label=who)
        right.set_xticks([0.2, 1.2, 2.2], ["P50", "P99", "max"])
        right.set(title="gaps of running answers while long prompts arrive", ylabel="ms", yscale="log")
        right.legend()
    figure.suptitle(results["device"])
    figure.tight_layout()
    figure.savefig(out / f"{name}.png", dpi=120)
    plt.close(figure)


def markdown(results: Result) -> str:
    parts = ["# One GPU, two engines", f"Made by `python -m benchmarks.gpu` on {results['device']}. Milliseconds."]
    if found := results.get("equality"):
        others = f"; the others are for the first {min(found['equal_tokens'])} tokens or more"
        itself = f"That engine, asked again one by one, gives {found['equal_to_itself']} of them."
        parts += [
            "## Equality",
            f"{found['equal']} of {found['prompts']} greedy answers of {found['tokens']} tokens are one engine's "
            f"({found['dtype']}){others if found['equal'] < found['prompts'] else ''}. {itself} "
            f"{found['verified']} transfers were compared by checksum, {found['corrupt']} differed; "
            f"{found['recomputed']} were recomputed.",
        ]
    if found := results.get("threads"):
        parts += [f"## CPU time, prompts of {found['tokens']:,} tokens", table(HEAD, lines(found["rows"]))]
    for part, title in (
        ("auto", "Our modes"),
        ("kv", "Transfers"),
        ("switches", "Asynchronous scheduling and CUDA graphs"),
    ):
        for model in dict.fromkeys(row["model"] for row in results.get(part, {}).get("rows", ())):
            mine = [row for row in results[part]["rows"] if row["model"] == model]
            parts += [f"## {title}: {model}", rows_table(mine)]
    if found := results.get("gaps"):
        head = ["engines", "P50", "P99", "max", "gaps", "long prompts"]
        cells = [
            [who, *(f"{found[who][f'{key}_ms']:.1f}" for key in ("p50", "p99", "max"))]
            + [str(found[who][key]) for key in ("gaps", "long_prompts")]
            for who in ("one engine", "prefill and decode")
        ]
        about = f"{found['streams']} answers run while a long prompt arrives every {found['interval_s']:.2f} s."
        parts += ["## Gaps between tokens", about, table(head, cells)]
    return "\n\n".join(parts) + "\n"
