"""Runs the tests on both kinds of server and compares: `make test-vllm-api`, or some by `-k`.

Exit code 1: a test that passes on the plain server fails on the fleet, both times that it was asked.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

_HERE = Path(__file__).parents[1]
sys.path[:0] = [str(_HERE.parent)]  # else `orchestrator` is the folder of its tests

from vllm_api import hub, selection  # noqa: E402
from vllm_api.source import VERSION, unpacked_tests  # noqa: E402

KINDS = ("plain", "fleet")
_TEST_TIMEOUT_S = 120


class Outcomes:
    """What became of each test on one kind of server."""

    def __init__(self) -> None:
        self.by_test: dict[str, str] = {}
        self.reasons: dict[str, str] = {}
        self.placements: Counter[str] = Counter()

    def read(self, file: Path) -> None:
        for text in file.read_text().splitlines():
            line = json.loads(text)
            if "placements" in line:
                self.placements.update(line["placements"])
            elif self.by_test.get(line["test"]) != "failed":  # a teardown's report comes after the call's
                self.by_test[line["test"]] = line["outcome"]
                self.reasons[line["test"]] = line["reason"]


def run(kind: str, tests: list[str], folder: Path, extra: list[str], verbose: bool) -> Outcomes:
    """One pytest session of vLLM's tests."""
    outcomes = Outcomes()
    with tempfile.TemporaryDirectory() as temporary:
        file, ini = Path(temporary) / "outcomes.jsonl", Path(temporary) / "pytest.ini"
        file.touch()
        ini.write_text("[pytest]\nasyncio_mode = strict\ntimeout_func_only = true\n")
        command = [sys.executable, "-m", "pytest", "-c", str(ini), "--rootdir", str(folder), "-q", "--tb=short"]
        command += ["-p", "vllm_api.plugin", "--confcutdir", str(folder / selection.ROOT), "-p", "no:cacheprovider"]
        command += [f"--timeout={_TEST_TIMEOUT_S}", "--continue-on-collection-errors", *extra, *tests]
        paths = [str(folder), str(_HERE), str(_HERE.parent), os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            "VLLM_API_KIND": kind,
            "VLLM_API_OUTCOMES": str(file),
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "HF_HUB_CACHE": str(hub.hub()),
            "HF_HUB_OFFLINE": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
        }
        output = None if verbose else subprocess.DEVNULL
        subprocess.run(command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT)
        outcomes.read(file)
    return outcomes


def differing(plain: Outcomes, fleet: Outcomes) -> list[str]:
    return [test for test, outcome in plain.by_test.items() if outcome == "passed" != fleet.by_test.get(test)]


def table(plain: Outcomes, fleet: Outcomes) -> str:
    """One row per module, then each test that did not pass on both."""
    rows: dict[str, list[Counter[str]]] = {}
    for column, outcomes in enumerate((plain, fleet)):
        for test, outcome in outcomes.by_test.items():
            rows.setdefault(test.partition("::")[0], [Counter(), Counter()])[column][outcome] += 1
    lines = [f"{'passed/failed/left out':<76} {'plain':>10} {'fleet':>10}"]
    for module, counts in rows.items():
        cells = ["/".join(str(count[outcome]) for outcome in ("passed", "failed", "skipped")) for count in counts]
        lines.append(f"{module.removeprefix(selection.ROOT + '/'):<76} {cells[0]:>10} {cells[1]:>10}")
    both = [test for test, outcome in plain.by_test.items() if outcome == "failed" == fleet.by_test.get(test)]
    lines += ["", f"{len(both)} fail on both, most of them because the demo model cannot do what they ask of it:"]
    lines += [f"  {test.removeprefix(selection.ROOT + '/')}: {_last(plain.reasons[test])}" for test in both]
    skipped = [test for test, outcome in plain.by_test.items() if outcome == "skipped"]
    lines += ["", f"{len(skipped)} are left out, or leave themselves out:"]
    lines += [f"  {test.removeprefix(selection.ROOT + '/')}: {_last(plain.reasons[test])}" for test in skipped]
    lines += ["", "modules that are left out:"]
    lines += [f"  {pattern.strip('*/')}: {reason}" for pattern, reason in selection.LEFT_OUT.items()]
    return "\n".join(lines)


def _last(reason: str) -> str:
    lines = [line for line in reason.strip().splitlines() if line.strip()] or [""]
    errors = [line for line in lines if line.startswith("E  ")] or lines[-1:]
    return errors[0].removeprefix("E").strip()[:160]


def main() -> None:
    parser = argparse.ArgumentParser(prog="vllm_api", description=__doc__)
    parser.add_argument("files", nargs="*", help="modules, as in selection.py; all without any")
    parser.add_argument("-k", help="as pytest's: only the tests whose names match")
    parser.add_argument("--verbose", action="store_true", help="show what pytest says")
    parser.add_argument("--output", type=Path, help="write the table to a file as well")
    options = parser.parse_args()
    folder = unpacked_tests()
    if new := selection.unlisted(folder):
        sys.exit(f"neither run nor left out by selection.py: {', '.join(new)}")
    files = [name for name in selection.FILES if not options.files or any(part in name for part in options.files)]
    extra = ["-k", options.k] if options.k else []
    plain, fleet = (run(kind, files, folder, extra, options.verbose) for kind in KINDS)
    worse = differing(plain, fleet)
    if worse:  # once more: some depend on what is sampled, and on time
        again = {kind: run(kind, worse, folder, [], options.verbose) for kind in KINDS}
        unsteady = set(worse) - set(differing(again["plain"], again["fleet"]))
        worse = [test for test in worse if test not in unsteady]
        print(*(f"unsteady: {test}" for test in unsteady), sep="\n")
    text = table(plain, fleet)
    placed = ", ".join(f"{decision} {count:.0f}" for decision, count in sorted(fleet.placements.items()))
    text += f"\n\nvLLM {VERSION}; the fleet's placements: {placed}\n"
    text += f"{len(worse)} pass on the plain server and fail on the fleet\n"
    for test in worse:
        text += f"\n{test}\n{fleet.reasons.get(test, 'did not run')}\n"
    print(text)
    if options.output:
        options.output.write_text(text)
    if not fleet.placements["remote"]:
        sys.exit("no prompt was prefilled remotely: nothing is said about remote prefill")
    sys.exit(1 if worse else 0)


if __name__ == "__main__":
    main()
