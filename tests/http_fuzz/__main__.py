"""Send many cases to a fleet with simulated engines, and tell what came of them. Exit code 1 if anything is wrong."""

import argparse
import asyncio
import json
import re
import sys
from pathlib import Path
from typing import Any

from support_fleet import RunningFleet, running_fleet

from http_fuzz.cases import Cases
from http_fuzz.run import Tally, Wrong, answer, figures, others, send_all, wrong_answers
from orchestrator.config.model import resolve_model

KEY = "operator-of-the-fuzz"
# Answers are short, so that those to sound requests cost little; every prompt of 16 tokens or more may be remote.
SETS = (
    "workers.engine_args.max_model_len=1024", "sim.speed=20", "limits.max_n=4", "routing.remote_prefill_min_tokens=16",
    "workers.engine_args.enable_prefix_caching=false", f"security.operator_key={KEY}", "limits.max_body_bytes=1000000",
)  # fmt: skip
_ALONE_S = 15.0
_ENDED = re.compile(r"starting it again|\[(prefill|decode)-\d+\] Traceback")


async def fuzz(fleet: RunningFleet, count: int, seed: int, at_once: int) -> tuple[Tally, dict[str, Any], list[str]]:
    """The tally, figures of the requests beside, and what is wrong with the fleet."""
    before = {worker["id"] for worker in fleet.workers()}
    async with others(fleet) as alone:
        await asyncio.sleep(_ALONE_S)
    cases = Cases(fleet.http.get("/openapi.json").json(), fleet.model, seed, KEY)
    async with others(fleet) as beside:
        tally = await send_all(fleet.url, cases.take(count), at_once)
    wrong = wrong_answers(alone + beside)
    await asyncio.to_thread(fleet.assert_no_leaks)
    if lost := before - {worker["id"] for worker in fleet.workers()}:
        wrong.append(f"workers lost: {sorted(lost)}")
    wrong += [line for line in fleet.process_lines() if _ENDED.search(line)][:20]
    placed = {way: fleet.metric("pd_placements_total", decision=way) for way in ("local", "remote")}
    return tally, {"alone": figures(alone), "beside": figures(beside), "placed": placed}, wrong


def compared(wrong: list[Wrong]) -> list[dict[str, Any]]:
    """One of each kind of wrong answer, beside what a plain vLLM server with the same model answers."""
    kinds = {found.like: found for found in wrong}
    if not kinds:
        return []
    from vllm_api.servers import Server, Wanted  # this makes models: only where they are needed

    options = ["--max-model-len", "1024", "--served-model-name", "demo"]
    plain = Server("plain", Wanted.of(resolve_model("demo"), options, None, True))
    try:
        rows = []
        for found in kinds.values():
            status, said = asyncio.run(answer(plain.url, found.case))
            plain.revive()
            rows.append(
                {
                    "cases": sum(each.like == found.like for each in wrong),
                    "fleet": [found.status, found.said],
                    "plain": [status, said],
                    "case": found.case.shown(),
                }
            )
        return rows
    finally:
        plain.stop()


def main() -> None:
    parser = argparse.ArgumentParser(prog="http_fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    with running_fleet("sim-2p2d.yaml", *SETS, api_key=KEY) as fleet:
        tally, figures, wrong = asyncio.run(fuzz(fleet, options.cases, options.seed, options.at_once))
    print(tally.by_status, figures, *wrong, *(found.like for found in tally.wrong[:50]), sep="\n", flush=True)
    kinds = compared(tally.wrong)
    ours = [kind for kind in kinds if 0 < kind["plain"][0] < 500]
    report = {
        "cases": tally.cases,
        "seed": options.seed,
        "kinds": dict(tally.by_kind),
        "statuses": {str(status): count for status, count in sorted(tally.by_status.items())},
        "slowest_s": round(tally.slowest_s, 2),
        **figures,
        "server_errors_of_vllm_too": [kind for kind in kinds if kind not in ours],
        "server_errors_of_the_fleet": ours,
        "wrong": wrong,
    }
    text = json.dumps(report, indent=2, ensure_ascii=True)
    print(text)
    if options.output is not None:
        options.output.write_text(text + "\n")
    sys.exit(1 if ours or wrong else 0)


if __name__ == "__main__":
    main()
