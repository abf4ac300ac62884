"""The results of `benchmarks.peers` as JSON, tables and a picture. Pure except for writing the files."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.headline import ONCE, ratios, shown
from benchmarks.peers.systems import FRONTENDS, MIXED, OURS, SYSTEMS, System
from benchmarks.tables import table

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")


def write(everything: Mapping[str, Any], folder: Path) -> None:
    """Write peers.json, peers.md, and peers.png if the serving part was measured and matplotlib is installed."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(everything, indent=1)
    (folder / "peers.json").write_text(text + "\n")
    everything = json.loads(text)  # so that keys are strings, as in a saved file
    (folder / "peers.md").write_text(markdown(everything))
    if "serving" in everything:
        _picture(everything["serving"]["systems"], folder / "peers.png")


def markdown(everything: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in everything["versions"].items())
    about = "Medians over the turns; ratios of the same turn, their median and spread"
    parts = ["# Beside the field", "", f"Made by `make bench-peers`: {versions}. {about}, {ONCE} where seen once.", ""]
    for part, tables in (("serving", _serving), ("mixed", _mixed), ("frontend", _frontend)):
        if part in everything:
            parts += tables(everything[part])
    return "\n".join(parts).rstrip() + "\n"


def _serving(found: Mapping[str, Any]) -> list[str]:
    tokens = f"{found['prompt_tokens']:,} prompt and 64 output tokens"
    lines = ["## Serving", "", f"{tokens}, two narrow layers, users who send again at once.", ""]
    head = ["system", "users", "turns", "requests/s", "TTFT P50, ms", "TTFT P99, ms", "TPOT P50, ms"]
    head += ["CPU per request, ms", "ours / it: requests/s", "TTFT P50", "CPU"]
    rows = []
    for name, users, runs in _cases(found):
        f = medians(runs)
        times = [f"{f[key] * 1e3:.1f}" for key in ("ttft_p50_s", "ttft_p99_s", "tpot_p50_s")]
        row = [name, users, len(runs), f"{f['requests_per_s']:.1f}", *times, f"{f['cpu_s'] * 1e3:.0f}"]
        rows.append(row + _beside(found, name, users, ("requests_per_s", "ttft_p50_s", "cpu_s")))
    return [*lines, table(head, rows), "", *_descriptions(found), ""]


def _mixed(found: Mapping[str, Any]) -> list[str]:
    objectives = f"TTFT {found['objectives']['ttft_s']:g} s and TPOT {found['objectives']['tpot_s']:g} s"
    about = f"The demo model; three chats for each document of 1,800 tokens. Goodput: answers within {objectives}."
    lines = ["## Chats that decode while documents are prefilled", "", about, ""]
    head = ["system", "requests/s asked", "turns", "chats: ITL P50, ms", "ITL P99, ms", "TTFT P99, s"]
    head += ["documents: TTFT P99, s", "requests not answered", "goodput, 1/s", "ours / it: ITL P99", "goodput"]
    rows = []
    for name, rate, runs in _cases(found):
        f = medians(runs)
        row = [name, rate, len(runs), f"{f['chat_itl_p50_s'] * 1e3:.1f}", f"{f['chat_itl_p99_s'] * 1e3:.1f}"]
        row += [f"{f['chat_ttft_p99_s']:.2f}", f"{f['document_ttft_p99_s']:.2f}"]
        row += [f"{f['errors']:g}", f"{f['goodput']:.2f}"]
        rows.append(row + _beside(found, name, rate, ("chat_itl_p99_s", "goodput")))
    return [*lines, table(head, rows), "", *_descriptions(found, MIXED), ""]


def _frontend(found: Mapping[str, Any]) -> list[str]:
    about = "CPU of its process for one streamed answer of 64 tokens, engines simulated."
    lines = ["## The frontend alone", "", about, ""]
    head = ["frontend", "prompt tokens", "turns", "CPU, ms", "requests/s, 16 users", "ours / it: CPU"]
    rows = []
    for name, tokens, runs in _cases(found):
        f = medians(runs)
        row = [name, tokens, len(runs), f"{f['cpu_s'] * 1e3:.2f}", f"{f['requests_per_s']:.1f}"]
        rows.append(row + _beside(found, name, tokens, ("cpu_s",), tokenizer=name.removeprefix("dynamo")))
    return [*lines, table(head, rows), "", *_descriptions(found, FRONTENDS), ""]


def _cases(found: Mapping[str, Any]) -> Iterator[tuple[str, str, list[dict[str, float]]]]:
    return ((name, case, runs) for name, cases in found["systems"].items() for case, runs in cases.items())


def medians(runs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {key: statistics.median(run[key] for run in runs) for key in runs[0]}


def _beside(found: Mapping[str, Any], name: str, case: str, keys: Sequence[str], tokenizer: str = "") -> list[str]:
    """Ours, with this tokenizer, divided by this system's; nothing for ours itself."""
    if name.partition(", ")[0] == OURS:
        return [""] * len(keys)
    ours = found["systems"].get(OURS + tokenizer, {}).get(case, ())
    return [shown(ratios(ours, found["systems"][name][case], key)) for key in keys]


def _descriptions(found: Mapping[str, Any], systems: Sequence[System] = SYSTEMS) -> list[str]:
    what = {system.name: system.what for system in systems}
    lines = [f"- {name}: {what.get(name, name)}" for name in found["systems"]]
    return lines + [f"- {name}: not measured. {why}" for name, why in found["failed"].items()]


def _picture(systems: Mapping[str, Any], path: Path) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    users = sorted({int(number) for by_users in systems.values() for number in by_users})
    panels = (
        ("requests_per_s", 1.0, "requests per second"),
        ("ttft_p50_s", 1e3, "TTFT P50, ms"),
        ("cpu_s", 1e3, "CPU per request, ms"),
    )
    figure = Figure(figsize=(12, 4.2), layout="constrained")
    width = 0.8 / max(1, len(systems))
    for axes, (key, factor, title) in zip(figure.subplots(1, len(panels)), panels, strict=True):
        for index, (name, by_users) in enumerate(systems.items()):
            places = [position + index * width for position in range(len(users))]
            heights = [
                medians(by_users[str(number)])[key] * factor if str(number) in by_users else 0.0 for number in users
            ]
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
