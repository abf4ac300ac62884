"""README's table of ratios: what is printed from the saved results, and nothing else."""

import json
from pathlib import Path

from benchmarks import headline

README = (Path(__file__).parents[2] / "README.md").read_text()


def test_readme_has_the_table_that_the_command_prints(capsys):
    headline.main()
    printed = capsys.readouterr().out
    assert printed in README
    assert (headline.ONCE in printed) == (f"{headline.ONCE}: seen once" in README)


def test_a_ratio_is_of_one_turn_and_has_its_spread():
    ours = [{"turn": turn, "cpu_s": cost} for turn, cost in ((1, 2.0), (2, 3.0), (4, 8.0))]
    its = [{"turn": turn, "cpu_s": cost} for turn, cost in ((1, 4.0), (3, 1.0), (4, 8.0))]
    assert headline.ratios(ours, its, "cpu_s") == [0.5, 1.0]
    assert headline.shown([0.5, 1.0, 0.7]) == "0.70 (0.50 to 1.00)"
    assert headline.shown([0.5]) == "0.50*" and headline.shown([]) == "not measured"


def test_the_table_is_of_the_saved_turns():
    kv, peers = (json.loads((headline.RESULTS / name).read_text()) for name in headline.SAVED)
    before = headline.table(kv, peers).splitlines()
    for run in peers["serving"]["systems"]["orchestrator"]["8"]:
        run["requests_per_s"] *= 2
    for row in kv["rows"]:
        factor = 2 if row["variant"] == "auto" else 1
        row["turns"] = {name: [(a, b * factor, *more) for a, b, *more in runs] for name, runs in row["turns"].items()}
    after = headline.table(kv, peers).splitlines()
    assert [one != two for one, two in zip(before, after, strict=True)] == [False, False, True, True, False, False]
