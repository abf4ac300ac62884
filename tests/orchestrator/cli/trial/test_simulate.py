"""`orchestrator simulate` as a user meets it."""

import json
import sys

import pytest
import typer
from typer.testing import CliRunner

from orchestrator.cli.trial.simulate import simulate_command
from orchestrator.config.settings import ConfigError

app = typer.Typer(pretty_exceptions_enable=False)
app.command()(simulate_command)


def run(*args: str):
    return CliRunner().invoke(app, args)


def test_json_is_one_report_per_run():
    result = run("--trace", "heavy_tailed", "--requests", "200", "--fleet", "2P2D", "--sweep", "rate=2,4", "--json")
    assert result.exit_code == 0, result.output
    reports = json.loads(result.stdout)
    assert [round(r["rate"]) for r in reports] == [2, 4]
    assert all(r["fleet"] == "2P2D" and r["policy"] == "ours" and r["finished"] == 200 for r in reports)


def test_a_table_and_a_plot(tmp_path):
    png = tmp_path / "out.png"
    args = ["--trace", "heavy_tailed", "--requests", "150", "--fleet", "1p1d", "--rate", "3", "--plot", str(png)]
    result = run(*args, "--policy", "kv_blocks", "--policy", "field:round_robin")
    assert result.exit_code == 0, result.output
    assert "kv_blocks" in result.stdout and "field:round_robin" in result.stdout
    assert png.read_bytes().startswith(b"\x89PNG")


def test_simulation_uses_configured_policies(tmp_path):
    """The fleet, the policies and the objectives of one file, changed by `--set` as `orchestrator up` would."""
    file = tmp_path / "served.yaml"
    file.write_text(
        """
        model: demo
        workers: {prefill: {replicas: 1}, decode: {replicas: 3}}
        routing: {remote_prefill_min_tokens: 1}
        slo: {ttft_s: 0.0001, tpot_s: 9}
        ratio: {mode: off}
        """
    )
    args = ["--trace", "heavy_tailed", "--requests", "50", "--rate", "5", "--json"]
    [served] = json.loads(run(*args, "--config", str(file)).stdout)
    assert served["fleet"] == "1P3D" and set(served["reasons"]) == {"remote:long_prompt"}
    assert served["attained_ttft"] == 0 and served["attained_tpot"] == 1
    [local] = json.loads(run(*args, "--config", str(file), "--set", "routing.remote_prefill_min_tokens=100000").stdout)
    assert set(local["reasons"]) == {"local:short_prompt"}


@pytest.mark.slow
def test_goodput_is_given_for_three_shares_with_the_tails(tmp_path):
    args = ["--trace", "heavy_tailed", "--requests", "100", "--fleet", "1P1D", "--sweep", "rate=goodput"]
    found = json.loads(run(*args, "--json").stdout)
    rates = found["goodput"]["ours"]
    assert list(rates) == ["90%", "95%", "99%"] and rates["90%"] >= rates["95%"] >= rates["99%"] > 0
    assert len({r["rate"] for r in found["runs"]}) == len(found["runs"])
    assert all(r["ttft_p99_s"] <= r["ttft_max_s"] and r["tpot_p99_s"] <= r["tpot_max_s"] for r in found["runs"])
    assert "goodput at 90%, 95%, 99%" in run(*args).stdout


def test_a_plot_without_matplotlib_names_the_mend(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    args = ["--trace", "heavy_tailed", "--requests", "50", "--fleet", "1P1D", "--plot", str(tmp_path / "out.png")]
    result = run(*args)
    assert isinstance(result.exception, ConfigError) and "pip install 'pd-orchestrator[bench]'" in str(result.exception)


def test_workers_can_be_killed_during_simulation():
    args = ["--trace", "heavy_tailed", "--requests", "200", "--fleet", "2P2D", "--rate", "10", "--json"]
    args += ["--set", "ratio.mode=off"]
    calm, killed = (run(*args, *more) for more in ([], ["--kill", "d0@5:5", "--kill", "p1@8:5"]))
    assert killed.exit_code == 0, killed.output
    before, after = json.loads(calm.stdout)[0], json.loads(killed.stdout)[0]
    assert after["finished"] == 200 and after["tpot_max_s"] > before["tpot_max_s"]


@pytest.mark.parametrize(
    ("args", "word"),
    [
        (["--fleet", "8x8"], "8P8D"),
        (["--fleet", "4P0D"], "decode worker"),
        (["--policy", "best"], "kv_prefix"),
        (["--profile", "tpu"], "h100-llama-8b"),
        (["--sweep", "rate=a"], "rate=10"),
        (["--rate", "-1"], "more than 0"),
        (["--requests", "1"], "expected 2 to"),
        (["--requests", "999999999999"], "expected 2 to"),
        (["--set", "kv.transfer=magic"], "chunk, layer, whole"),
        (["--config", "nowhere.yaml"], "nowhere.yaml"),
        (["--kill", "d0"], "d0@30:10"),
        (["--kill", "x9@1:1"], "not in this fleet"),
        (["--ttft", "-2"], "more than 0 seconds"),
    ],
)
def test_impossible_fleet_is_refused_in_one_line(args, word):
    result = run("--trace", "bursty", *args)
    assert isinstance(result.exception, ConfigError), result.output
    assert word in str(result.exception) and "\n" not in str(result.exception)
    assert result.stdout == ""
