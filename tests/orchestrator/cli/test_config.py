"""`orchestrator config`: what is in effect and where it is from, and a file to begin with."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from orchestrator.cli.config import app, default_config_text
from orchestrator.config.settings import Config, ConfigError, Refused, load_config

runner = CliRunner()


def shown(*arguments: str) -> dict[str, tuple[object, str]]:
    done = runner.invoke(app, ["show", "--json", *arguments])
    assert done.exit_code == 0, done.output
    return {row["key"]: (row["value"], row["from"]) for row in json.loads(done.stdout)}


def test_each_value_says_where_it_is_from(tmp_path: Path):
    file = tmp_path / "c.yaml"
    file.write_text("model: demo\nworkers: {engine_args: {dtype: float32}, decode: {replicas: 2}}\n")
    rows = shown(str(file), "--set", "workers.decode.replicas=3")
    assert rows["model"] == ("demo", str(file))
    assert rows["workers.engine_args"] == ({"dtype": "float32"}, str(file))
    assert rows["workers.decode.replicas"] == (3, "--set")
    assert rows["workers.prefill.replicas"] == (1, "default")
    assert set(shown(str(file), "--changed")) == {"model", "workers.engine_args", "workers.decode.replicas"}


def test_each_value_of_one_of_several_models_says_where_it_is_from(tmp_path: Path):
    file = tmp_path / "c.yaml"
    file.write_text("slo: {ttft_s: 1.0}\nmodels: {a: {model: demo}, b: {model: demo, slo: {tpot_s: 0.2}}}\n")
    rows = shown(str(file), "--model", "b", "--set", "models.b.kv.verify=true")
    assert rows["namespace"][0] == "default.b"
    assert rows["slo.ttft_s"] == (1.0, str(file)) and rows["slo.tpot_s"] == (0.2, str(file))
    assert rows["kv.verify"] == (True, "--set")
    assert shown(str(file), "--model", "a")["slo.tpot_s"][1] == "default"
    assert shown(str(file), "--namespace", "default.b") == shown(str(file), "--model", "b")
    added = shown(str(file), "--model", "new", "--set", "models.new.model=other")
    assert added["model"] == ("other", "--set") and added["slo.ttft_s"] == (1.0, str(file))


def test_without_a_file_or_a_fleet_it_asks_for_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Not for the Redis of a fleet elsewhere, which does not have this host's part."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    for arguments, where in (((), ""), (("--namespace", "other"), " in namespace 'other'")):
        said = runner.invoke(app, ["show", *arguments]).exception
        assert str(said) == f"no fleet runs on this machine{where}; name a file"


def test_a_file_of_one_model_may_be_asked_for_its_namespace(tmp_path: Path):
    file = tmp_path / "c.yaml"
    file.write_text("model: demo\nnamespace: mine\n")
    assert shown(str(file), "--namespace", "mine") == shown(str(file))
    wrong = runner.invoke(app, ["show", str(file), "--namespace", "yours"]).exception
    assert "has one: leave --model out" in str(wrong)


@pytest.mark.parametrize("command", ["check", "show"])
def test_a_file_that_is_not_utf8_is_refused_in_one_line(command: str, tmp_path: Path):
    file = tmp_path / "c.yaml"
    file.write_bytes("model: démo\n".encode("latin-1"))
    said = runner.invoke(app, [command, str(file)]).exception
    assert isinstance(said, ConfigError) and str(said) == f"{file}: expected text in UTF-8, got byte 0xe9"


@pytest.mark.parametrize(("gpus", "fleet"), [(0, (1, 1)), (1, (1, 1)), (2, (1, 1)), (5, (2, 3)), (8, (4, 4))])
def test_default_config_is_valid_for_each_machine(gpus: int, fleet: tuple[int, int], tmp_path: Path):
    def read(text: str) -> Config:
        (tmp_path / "c.yaml").write_text(text)
        return load_config(tmp_path / "c.yaml")

    config = read(default_config_text(gpus, 2))
    assert (config.workers.prefill.replicas, config.workers.decode.replicas) == fleet
    assert ("gpu_memory_utilization" in config.workers.engine_args) == (gpus > 0)
    lines = default_config_text(gpus, 2).splitlines()[1:]
    whole = "\n".join(re.sub(r"^( *)# (?=[ a-z_]+:)", r"\1", line) for line in lines)
    assert whole.count("\n#") == whole.count("\n  #") == 0
    assert read(whole) == config, "what is commented out is the default"


def test_existing_file_is_kept(tmp_path: Path):
    file = tmp_path / "c.yaml"
    assert runner.invoke(app, ["init", str(file)]).exit_code == 0
    before = file.read_text()
    assert isinstance(runner.invoke(app, ["init", str(file)]).exception, Refused)
    assert file.read_text() == before


def test_keys_and_passwords_are_not_shown(tmp_path: Path):
    file = tmp_path / "c.yaml"
    file.write_text(
        "model: demo\nredis: {url: 'redis://user:hidden@10.0.0.1:6379'}\n"
        "security: {operator_key: hidden, api_keys: [hidden, hidden]}\n"
        "workers: {env: {HF_TOKEN: hidden}, engine_args: {hf_token: hidden, max_num_batched_tokens: 8}}\n"
        "frontend: {server_args: {ssl_certfile: c.pem, ssl_keyfile_password: hidden}}\n"
    )
    rows = shown(str(file))
    assert rows["redis.url"][0] == "redis://user:***@10.0.0.1:6379"
    assert (rows["security.operator_key"][0], rows["security.api_keys"][0]) == ("***", ["***", "***"])
    assert rows["workers.engine_args"][0] == {"hf_token": "***", "max_num_batched_tokens": 8}
    assert rows["workers.env"][0] == {"HF_TOKEN": "***"}
    assert "hidden" not in runner.invoke(app, ["show", str(file)]).output
    file.write_text("model: demo\n")
    assert not [key for key, (value, _) in shown(str(file)).items() if "***" in str(value)], "no key, no password"
