"""Lists every name of vLLM and NIXL that this project imports, calls, reads, extends, overrides or replaces.

    PYTHONPATH=tests python -m vllm_contract [--json] [FOLDER [OTHER]]

FOLDER (default: the installed packages) is where it looks; with OTHER, an unpacked wheel, it lists what differs there.
It reads source, ours and theirs, and imports nothing: so it can compare a version that has no build for this machine.
"""

from __future__ import annotations

import argparse
import sys
import sysconfig
from pathlib import Path

import msgspec

from vllm_contract.source import Source
from vllm_contract.uses import differences, shapes, uses

_PROJECT = Path(__file__).resolve().parents[2]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="vllm_contract", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", nargs="?", type=Path, default=Path(sysconfig.get_paths()["purelib"]))
    parser.add_argument("other", nargs="?", type=Path)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    source = Source(_PROJECT, given.folder)
    used = uses(_PROJECT, source)
    now = shapes(source, used)
    changed = differences(now, shapes(Source(given.other), used)) if given.other else {}
    shown = changed if given.other else now
    rows = [
        {"symbol": use.symbol, "how": use.how, "where": used[use], "shape": now[use], "change": changed.get(use, "")}
        for use in sorted(shown)
    ]
    if given.json:
        print(msgspec.json.format(msgspec.json.encode(rows)).decode())
        return 0
    for use in sorted(shown):
        print(f"{use.how:10} {use.symbol}  {changed.get(use) or now[use].signature}")
        print(f"{'':10}   {', '.join(used[use])}")
    print(f"{len(used)} uses, {len(changed)} differ" if given.other else f"{len(used)} uses")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
