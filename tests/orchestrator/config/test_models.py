"""A file of several models: one configuration for each, and what contradicts itself is refused with its line."""

import contextlib
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.cli.config import checked_models
from orchestrator.config.models import load_model, load_models, parse_models
from orchestrator.config.settings import ConfigError, load_config, parse_config

TWO = """\
engine: sim
slo: {ttft_s: 1.0}
frontend: {port: 8001, server_args: {max_logprobs: 5}}
workers:
  engine_args: {dtype: float32}
models:
  small:
    model: demo
    workers:
      decode: {replicas: 3}
      engine_args: {block_size: 32}
  qwen2.5:
    model: demo
    served_model_name: org/qwen2.5
    slo: {tpot_s: 0.2}
    frontend: {server_args: {chat_template: x}}
"""


def test_each_model_has_the_file_with_its_section_over_it(tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text(TWO)
    small, qwen = load_models(file, ["namespace=n", "models.small.slo.ttft_s=3"]).values()
    assert (small.namespace, qwen.namespace) == ("n.small", "n.qwen2.5")
    assert (small.name_served, qwen.name_served) == ("small", "org/qwen2.5")
    assert (small.slo.ttft_s, small.slo.tpot_s) == (3.0, 0.1)
    assert (qwen.slo.ttft_s, qwen.slo.tpot_s) == (1.0, 0.2)
    assert (small.workers.decode.replicas, qwen.workers.decode.replicas) == (3, 1)
    assert small.workers.engine_args == {"dtype": "float32", "block_size": 32}
    assert qwen.frontend.server_args == {"max_logprobs": 5, "chat_template": "x"}
    assert small.frontend.port == qwen.frontend.port == 8001


def test_one_model_of_a_file_is_chosen_by_its_name(tmp_path: Path) -> None:
    several, only, plain = (tmp_path / name for name in ("several.yaml", "only.yaml", "plain.yaml"))
    several.write_text(TWO)
    only.write_text("models: {a: {model: demo}}\n")
    plain.write_text("model: demo\n")
    for name, config in load_models(several).items():
        assert load_model(several, None, name) == config
    assert load_model(only) == load_model(only, [], "a") == load_models(only)["a"]
    shared = ["slo.tpot_s=3", "slo.ttft_s=2", "models.small.slo.tpot_s=4"]
    slos = [load_model(several, shared, name).slo for name in ("qwen2.5", "small")]
    assert [(slo.ttft_s, slo.tpot_s) for slo in slos] == [(2.0, 3.0), (2.0, 4.0)], "over the model's own section too"
    assert load_model(plain, [], "default") == load_config(plain), "its namespace means it too"
    assert load_model(several, ["slo.ttft_s=2"], "default.small") == load_model(several, ["slo.ttft_s=2"], "small")
    added = load_model(several, ["models.new.model=other"], "new")
    assert (added.model, added.namespace) == ("other", "default.new")
    assert load_model(plain, ["namespace=n"]) == load_config(plain, ["namespace=n"])
    for file, name, why in [
        (several, None, "several.yaml has small, qwen2.5: name one with --model"),
        (several, "gone", "several.yaml has small, qwen2.5: name one with --model"),
        (several, "", "several.yaml has small, qwen2.5: name one with --model"),
        (plain, "a", "plain.yaml has one: leave --model out"),
    ]:
        with pytest.raises(ConfigError, match=re.escape(why)):
            load_model(file, None, name)


def test_an_override_reaches_a_model_whose_name_has_dots(tmp_path: Path) -> None:
    (file := tmp_path / "c.yaml").write_text("models: {q-2.5: {model: demo}, q-2: {model: demo}}\n")
    models = load_models(file, ["models.q-2.5.slo.ttft_s=3", "models.q-2.slo.ttft_s=4"])
    assert {name: config.slo.ttft_s for name, config in models.items()} == {"q-2.5": 3.0, "q-2": 4.0}


def test_a_file_of_one_model_means_what_it_meant(tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text("model: demo\nnamespace: n\nslo: {ttft_s: 3}\n")
    assert load_models(file) == {"": load_config(file)}


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("models: {}", "line 1: models: expected a section with a name for each model"),
        ("model: demo\nmodels: {a: {model: demo}}", "line 1: model: there is models too"),
        ("models:\n  a: demo", "line 2: models.a: expected a section, got 'demo'"),
        ("models:\n  a/b: {model: demo}", "line 1: models: expected text of letters"),
        ("models:\n  a: {slo: {}}", "line 2: models.a.model: required, but not given"),
        ("models:\n  a:\n    model: m\n    slo: {x: 1}", "line 4: models.a.slo.x: unknown key"),
        ("models:\n  a.b:\n    model: m\n    slo:\n      x: 1", "line 5: models.a.b.slo.x: unknown key"),
        ("models: {a: {model: m}}\nslo:\n  x: 1", "line 3: slo.x: unknown key"),
        (
            "models:\n  a: {model: m}\n  b: {model: m, served_model_name: a}",
            "line 3: models.b.served_model_name: clients",
        ),
        ("models:\n  a:\n    model: m\n    redis: {}", "line 4: models.a.redis: all models share it"),
        (
            "models:\n  a:\n    model: m\n    frontend:\n      port: 1",
            "line 5: models.a.frontend.port: all models share",
        ),
        (
            "models:\n  a:\n    model: m\n    frontend:\n      server_args:\n        ssl_certfile: f",
            "line 6: models.a.frontend.server_args.ssl_certfile: all models share the server",
        ),
        (
            "models:\n  a:\n    model: m\n    workers:\n      engine_args:\n        model: x",
            "line 6: models.a.workers.engine_args.model: is set by the fleet",
        ),
        (
            "redis: {url: 'redis://h'}\nlauncher: {kind: ray}\nmodels: {a: {model: m}, b: {model: m}}",
            "line 2: launcher.kind: several models run on one host so far",
        ),
    ],
)
def test_what_contradicts_itself_is_refused_with_its_line(tmp_path: Path, text: str, line: str) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=f"fleet.yaml, {line}"):
        checked_models(file)


def test_what_takes_one_model_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="models: unknown key; one model is expected here"):
        parse_config({"models": {"a": {"model": "m"}}})


scalars = st.none() | st.booleans() | st.integers() | st.text(max_size=4) | st.lists(st.integers(), max_size=2)
trees = st.recursive(scalars, lambda part: st.dictionaries(st.sampled_from(["slo", "frontend", "model"]), part))


@given(st.dictionaries(st.text(max_size=3) | st.integers(), trees, max_size=3) | trees)
def test_any_models_are_configurations_or_refused(models: Any) -> None:
    with contextlib.suppress(ConfigError):
        assert len(parse_models({"models": models})) == len(models)
