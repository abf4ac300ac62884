"""`python -m benchmarks.headline`: the table of README, from the saved results of `bench-kv` and `bench-peers`.

A ratio is ours divided by another system's in the same turn. Its spread is over the turns.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import tables

RESULTS = Path(__file__).parent / "results"
SAVED = ("bench_kv.json", "peers.json")
ONCE = "*"
KV_TOKENS = (2048,)


def ratios(ours: Sequence[Mapping[str, Any]], its: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    """One for each turn that both have."""
    theirs = {run["turn"]: run[key] for run in its}
    return [run[key] / theirs[run["turn"]] for run in ours if theirs.get(run["turn"])]


def shown(found: Sequence[float]) -> str:
    """The median with its spread; `ONCE` marks a ratio that was seen only once."""
    if not found:
        return "not measured"
    if len(found) == 1:
        return f"{found[0]:.2f}{ONCE}"
    return f"{statistics.median(found):.2f} ({min(found):.2f} to {max(found):.2f})"


def table(kv: Mapping[str, Any], peers: Mapping[str, Any]) -> str:
    """`kv`, `peers`: what bench_kv.json and peers.json have."""

    def of(part: str, ours: str, other: str, key: str, cases: Sequence[str]) -> str:
        systems = peers.get(part, {}).get("systems", {})
        found = [[systems.get(name, {}).get(case, ()) for name in (ours, other)] for case in cases]
        return ", ".join(shown(ratios(mine, theirs, key)) for mine, theirs in found)

    def cost(tokenizer: str) -> str:
        return of("frontend", f"orchestrator{tokenizer}", f"dynamo{tokenizer}", "cpu_s", ("32", "1024"))

    requests = of("serving", "orchestrator", "vllm-router, repaired", "requests_per_s", ("1", "8", "32"))
    goodput = of("mixed", "orchestrator", "two aggregated", "goodput", ("0.5", "1.0", "1.5"))
    lengths = " and ".join(f"{tokens:,}" for tokens in KV_TOKENS)
    rows = [
        (
            f"KV transfer time that a client waits for, prompts of {lengths} tokens",
            "vLLM's push connector",
            ", ".join(shown(_exposed(kv, tokens)) for tokens in KV_TOKENS),
            "`make bench-kv`",
        ),
        (
            "requests per second with 1, 8 and 32 users, a small model",
            "vllm-router with vLLM's NixlConnector",
            requests,
            "`make bench-peers`",
        ),
        (
            "goodput of chats among documents at 0.5, 1.0 and 1.5 requests/s",
            "two aggregated vLLM",
            goodput,
            "`make bench-peers`",
        ),
        (
            "CPU time of the frontend for a prompt of 32 and 1,024 tokens",
            "Dynamo's frontend",
            f"{cost('')}; {cost(', fastokens')} with fastokens in both",
            "`make bench-peers`",
        ),
    ]
    return tables.table(("on two CPU cores", "divided by that of", "figure", "command"), rows)


def _exposed(kv: Mapping[str, Any], tokens: int) -> list[float]:
    rows = [row for row in kv["rows"] if (row["model"], row["tokens"]) == ("kv-heavy", tokens)]
    runs = {
        row["variant"]: [
            {"turn": turn, "exposed": statistics.median(exposed for _, exposed, *_ in found)}
            for turn, found in row["turns"].items()
        ]
        for row in rows
    }
    return ratios(runs.get("auto", ()), runs.get("stock push, repaired", ()), "exposed")


def main() -> None:
    print(table(*(json.loads((RESULTS / name).read_text()) for name in SAVED)))


if __name__ == "__main__":
    main()
