"""The results of `benchmarks.peers` as JSON, tables and a picture. Pure except for writing the files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.systems import FRONTENDS, OURS, SYSTEMS, System

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")


def write(everything: Mapping[str, Any], folder: Path) -> None:
    """Write peers.json, peers.md, and peers.png if the serving part was measured and matplotlib is installed."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(everything, indent=1)
    (folder / "peers.json").write_text(text + "\n")
    everything = json.loads(text)  # so that keys are strings, as in a saved file
    (folder / "peers.md").write_text(markdown(everything))
    if "serving" in everything:
        _picture(everything["serving"], folder / "peers.png")


def markdown(everything: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in everything["versions"].items())
    parts = ["# Beside the field", "", f"Made by `make bench-peers`: {versions}. Medians over the turns.", ""]
    if "serving" in everything:
        parts += _serving(everything["serving"])
    if "mixed" in everything:
        parts += _mixed(everything["mixed"])
    if "frontend" in everything:
        parts += _frontend(everything["frontend"])
    return "\n".join(parts).rstrip() + "\n"


def _serving(found: Mapping[str, Any]) -> list[str]:
    lines = ["## Serving", "", "512 prompt and 64 output tokens, two narrow layers, users who send again at once.", ""]
    head = ["system", "users", "requests/s", "TTFT P50, ms", "TTFT P99, ms", "TPOT P50, ms", "CPU per request, ms"]
    rows = []
    for name, by_users in found["systems"].items():
        for users, f in by_users.items():
            ours = found["systems"].get(OURS, {}).get(users)
            times = [f"{f[key] * 1e3:.1f}" for key in ("ttft_p50_s", "ttft_p99_s", "tpot_p50_s")]
            row = [name, users, f"{f['requests_per_s']:.1f}", *times, f"{f['cpu_s'] * 1e3:.0f}"]
            more = _ratio(ours, f, "requests_per_s"), _ratio(ours, f, "ttft_p50_s"), _ratio(ours, f, "cpu_s")
            rows.append([*row, *more] if name != OURS else [*row, "", "", ""])
    head += ["ours / it: requests/s", "TTFT P50", "CPU"]
    return [*lines, *_table(head, rows), "", *_descriptions(found), ""]


def _mixed(found: Mapping[str, Any]) -> list[str]:
    objectives = f"TTFT {found['objectives']['ttft_s']:g} s and TPOT {found['objectives']['tpot_s']:g} s"
    lines = ["## Chats that decode while documents are prefilled", ""]
    lines += [
        f"The demo model; three chats for each document of 1,800 tokens. Goodput: answers within {objectives}.",
        "",
    ]
    head = ["system", "requests/s asked", "chats: ITL P50, ms", "ITL P99, ms", "TTFT P99, s", "documents: TTFT P99, s"]
    head += ["requests not answered", "goodput, 1/s", "ours / it: ITL P99", "goodput"]
    rows = []
    for name, by_rate in found["systems"].items():
        for rate, f in by_rate.items():
            ours = found["systems"].get(OURS, {}).get(rate)
            row = [name, rate, f"{f['chat_itl_p50_s'] * 1e3:.1f}", f"{f['chat_itl_p99_s'] * 1e3:.1f}"]
            row += [f"{f['chat_ttft_p99_s']:.2f}", f"{f['document_ttft_p99_s']:.2f}"]
            row += [f"{f['errors']:g}", f"{f['goodput']:.2f}"]
            more = [_ratio(ours, f, "chat_itl_p99_s"), _ratio(ours, f, "goodput")] if name != OURS else ["", ""]
            rows.append([*row, *more])
    return [*lines, *_table(head, rows), "", *_descriptions(found), ""]


def _frontend(found: Mapping[str, Any]) -> list[str]:
    lines = [
        "## The frontend alone",
        "",
        "CPU of its process for one streamed answer of 64 tokens, engines simulated.",
        "",
    ]
    rows = []
    for name, by_tokens in found["systems"].items():
        for tokens, f in by_tokens.items():
            system, *tokenizer = name.split(", ")
            ours = found["systems"].get(", ".join([OURS, *tokenizer]), {}).get(tokens)
            row = [name, tokens, f"{f['cpu_s'] * 1e3:.2f}", f"{f['requests_per_s']:.1f}"]
            rows.append([*row, _ratio(ours, f, "cpu_s") if system != OURS else ""])
    head = ["frontend", "prompt tokens", "CPU, ms", "requests/s, 16 users", "ours / it: CPU"]
    return [*lines, *_table(head, rows), "", *_descriptions(found, FRONTENDS), ""]


def _descriptions(found: Mapping[str, Any], systems: Sequence[System] = SYSTEMS) -> list[str]:
    what = {system.name: system.what for system in systems}
    lines = [f"- {name}: {what.get(name, name)}" for name in found["systems"]]
    return lines + [f"- {name}: not measured. {why}" for name, why in found["failed"].items()]


def _ratio(ours: Mapping[str, float] | None, its: Mapping[str, float], key: str) -> str:
    return f"{ours[key] / its[key]:.2f}" if ours and its[key] else "-"


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    return [f"| {' | '.join(str(cell) for cell in row)} |" for row in (head, ["---"] * len(head), *rows)]


def _picture(found: Mapping[str, Any], path: Path) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    systems = found["systems"]
    users = sorted({int(number) for by_users in systems.values() for number in by_users})
    panels = (("requests_per_s", 1.0, "requests per second"), ("ttft_p50_s", 1e3, "TTFT P50, ms"))
    panels += (("cpu_s", 1e3, "CPU per request, ms"),)
    figure = Figure(figsize=(12, 4.2), layout="constrained")
    width = 0.8 / max(1, len(systems))
    for axes, (key, factor, title) in zip(figure.subplots(1, len(panels)), panels, strict=True):
        for index, (name, by_users) in enumerate(systems.items()):
            places = [position + index * width for position in range(len(users))]
            heights = [by_users[str(number)][key] * factor if str(number) in by_users else 0.0 for number in users]
            axes.bar(places, heights, width, label=name, color=COLOURS[index % len(COLOURS)])
        axes.set_xticks([position + 0.4 - width / 2 for position in range(len(users))], [str(n) for n in users])
        axes.set_title(title)
        axes.set_xlabel("users")
        if key != "requests_per_s":
            axes.set_yscale("log")  # systems differ by a factor of a hundred
        axes.grid(axis="y", color="#e6e6e6")
        axes.set_axisbelow(True)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path, format="png", dpi=110)
