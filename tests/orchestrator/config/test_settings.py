"""Every mistake in a configuration is one line that names the key, the value and the mend."""

import contextlib
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support_fuzz import values

from orchestrator.cli.look.views import _OFTEN, OFTEN, SELDOM, SOMETIMES, config_keys, how_often
from orchestrator.config.engine_args import check_engine_args, group_size, unit_size
from orchestrator.config.explain import _INSTEAD
from orchestrator.config.models import load_models
from orchestrator.config.settings import Config, ConfigError, load_config, parse_config
from orchestrator.config.yaml_text import load_yaml
from orchestrator.types import Role

CONFIGS = sorted((Path(__file__).parents[3] / "configs").glob("*.yaml"))


def load(tmp_path: Path, text: str, *sets: str) -> Config:
    file = tmp_path / "config.yaml"
    file.write_text(text)
    return load_config(file, list(sets))


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_every_example_is_valid(file):
    load_models(file, [], check_engine_args)


def test_there_are_examples_for_each_topology():
    shapes = {}
    for file in CONFIGS:
        config = next(iter(load_models(file).values()))
        shapes[file.stem] = (config.workers.prefill.replicas, config.workers.decode.replicas, config.engine)
    assert shapes["demo-1p1d-cpu"] == (1, 1, "vllm")
    assert shapes["sim-2p2d"] == (2, 2, "sim")
    assert shapes["aggregated-cpu"][0] == 0
    assert shapes["cuda-2p6d-tp"] == (2, 6, "vllm")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            "model: demo\nworkers: {prefill: {replicas: two}}",
            "workers.prefill.replicas: expected an integer, got 'two'",
        ),
        (
            "model: demo\nworkers: {prefill: {replicas: -1}}",
            "workers.prefill.replicas: expected an integer >= 0, got -1",
        ),
        (
            "model: demo\nworkers: {decode: {replicas: 0}}",
            "workers.decode.replicas: expected an integer >= 1 (decode workers answer requests), got 0",
        ),
        ("model: demo\nworkers: {prefill: {replicas: 10000000}}", "expected an integer <= 10000, got 10000000"),
        ("model: demo\nfrontend: {replicas: some}", "frontend.replicas: expected one of auto, got 'some'"),
        ("model: demo\nfrontend: {replicas: 1000000}", "frontend.replicas: expected an integer <= 1000, got 1000000"),
        ("model: demo\nnamespace: " + "a" * 65, "namespace: expected text of length <= 64, got 'aaa"),
        ("model: demo\nslo: {1: 2}", "slo: expected a name, as text, before each ':'"),
        ("model: demo\nslo: {'': 2}", "slo.: unknown key"),
        ("model: \x01", "not valid YAML: unacceptable character #x0001"),
        (
            "model: demo\nrouting: {remote_prefil_min_tokens: 3}",
            "routing.remote_prefil_min_tokens: unknown key; `orchestrator config keys` lists the known ones",
        ),
        (
            "model: demo\nsecurity: {mesh: none}\nworkers: {bind: 10.0.0.5}",
            "security.mesh: none lets whoever reaches 10.0.0.5 use the workers; remove it, or set "
            "security.trust_network: true where nobody else is on that network",
        ),
        (
            "model: demo\nqueue: {order: slack, weight: 8}",
            "queue: unknown key; remove it: jobs go by arrival and predicted time; claims hold 2.5 x workers.timeout_s",
        ),
        ("model: demo\nkv: {transfer: stream}", "kv.transfer: expected one of auto, chunk, layer, whole, got 'stream'"),
        ("model: demo\nengine: tpu", "engine: expected one of vllm, sim, got 'tpu'"),
        ("workers: {}", "model: required, but not given"),
        ("model: demo\nredis: {url: localhost}", "redis.url: expected 'embedded', redis://, rediss:// or unix://"),
        ("model: demo\nworkers: {timeout_s: .inf}", "workers.timeout_s: expected a number <= 1000000.0, got inf"),
        (
            "model: demo\nworkers: {engine_args: {hf_overrides: {a: [1, .nan]}}}",
            "workers.engine_args.hf_overrides.a: expected a finite number, got nan",
        ),
        ("model: demo\nlimits: {max_body_bytes: 1" + "0" * 30 + "}", "an integer <= 1000000000000, got an integer"),
        ('model: "a\\0b"', "model: expected text of one line without control characters, got 'a\\x00b'"),
        ('model: demo\nworkers: {engine_args: {a: "\\0"}}', "workers.engine_args.a: expected text, got '\\x00' in it"),
        (
            "model: demo\nworkers: {engine_args: {a: 1" + "0" * 30 + "}}",
            "engine_args.a: expected an integer of 64 bits",
        ),
        ("model: demo\nsecurity: {operator_key: [secret]}", "security.operator_key: expected text or null, got ***"),
        ("model: demo\nsecurity: {api_keys: secret}", "security.api_keys: expected a list, got ***"),
        ('model: demo\nworkers: {engine_args: {"\\0": 1}}', "workers.engine_args: a name in it: expected text"),
        (
            "model: demo\nworkers: {engine_args: {a: &a [*a]}}",
            "it has more than 100000 values",
        ),
        ("model: demo\nworkers: {decode: {env: {A=B: c}}}", "workers.env: expected names of variables, got 'A=B'"),
        ("model: demo\nworkers: {env: {'': c}}", "workers.env: expected names of variables, got ''"),
        (
            "model: demo\nworkers: {env: {A: 1}}",
            "workers.env: expected text for each name in it; in quotes it is text, after --set as 'KEY=\"VALUE\"'",
        ),
        ("model: demo\nnamespace: 2024", "namespace: expected text, got 2024; in quotes it is text"),
        ("model: demo\nworkers: {bind: null}", "workers.bind: expected text, got nothing"),
        ("[1, 2]", "expected a mapping of keys to values, got a section or list"),
        ("model: demo\nworkers: ]", "line 2: not valid YAML"),
        ("model: demo\nqueue: {}\nmodel: other", "line 3: not valid YAML: 'model' is there twice"),
        ("model: demo\nqueue:\n  lease_s: 1\n  lease_s: 2", "line 4: not valid YAML: 'lease_s' is there twice"),
        (
            "model: demo\nsecurity: {operator_key: ''}",
            "security.operator_key: expected text of length >= 1, got ''",
        ),
        ("model: demo\nredis: {url: 'redis://h:99999'}", "redis.url: expected a port from 1 to 65535 in 'h:99999'"),
        ("model: demo\nworkers: {bind: 300.1.1.1}", "workers.bind: expected an address or the name of a host, got"),
        ("model: demo\nslo: {ttft_s: 1.0e+308}", "slo.ttft_s: expected a number <= 1000000.0, got 1e+308"),
        (
            "model: demo\nslo: {classes: {chat: {ttft_s: 1}, a.b: {ttft_s: -1}}}",
            "slo.classes.a.b.ttft_s: expected a number >= 0.0001, got -1",
        ),
        ("model: demo\nslo: {classes: {chat: {ttft: 1}}}", "slo.classes.chat.ttft: unknown key"),
        (
            "model: demo\nslo: {classes: {chat: {tpot_s: x}}}",
            "slo.classes.chat.tpot_s: expected a number or null, got 'x'",
        ),
        ("model: demo\nslo: {classes: {a b: {ttft_s: 1}}}", "slo.classes: expected text of letters, digits"),
        ("model: demo\nlimits: {shares: {Zoë: 2}}", "limits.shares: expected a name of printable ASCII characters"),
        (f"model: demo\nlimits: {{shares: {{{'a' * 101}: 2}}}}", "limits.shares: expected a name of length <= 100"),
        ("model: demo\nworkers: {labels: {a b: c}}", "workers.labels: expected a name of letters, digits"),
        ("model: demo\nworkers: {labels: {a: b c}}", "workers.labels: expected text of letters, digits"),
        (
            "model: demo\nworkers: {heartbeat_s: 3}",
            "workers.heartbeat_s: unknown key; remove it: it is a quarter of workers.timeout_s",
        ),
        (
            "model: demo\nrouting: {fallback: refuse}",
            "ratio.min_prefill: expected at least what routing.fallback: refuse needs (1), got 0",
        ),
        ('model: demo\nsecurity: {operator_key: "a\\n"}', "expected text of printable ASCII characters without spaces"),
        ("model: demo\nsecurity: {api_keys: [a, '']}", "security.api_keys[1]: expected text of length >= 1, got ''"),
    ],
)
def test_mistakes_are_named(tmp_path, text, line):
    with pytest.raises(ConfigError) as error:
        load(tmp_path, text)
    assert line in str(error.value) and "\n" not in str(error.value)


def test_overrides_reach_into_sections_and_are_checked_like_the_file(tmp_path):
    sets = ("workers.prefill.replicas=3", "workers.engine_args.dtype=float32", "slo.tpot_s=1")
    config = load(tmp_path, "model: demo", *sets)
    assert config.workers.prefill.replicas == 3
    assert config.workers.engine_args == {"dtype": "float32"}
    assert config.slo.tpot_s == 1
    for override in ("frontend.port=70000", "frontend", "model.a=1", "nonsense.key=1", "slo..ttft_s=1"):
        with pytest.raises(ConfigError, match=override.partition("=")[0].split(".")[0]):
            load(tmp_path, "model: demo", override)


@pytest.mark.parametrize(
    ("typed", "read"),
    [
        *((text, text) for text in ("::", "::1", "no", "08", "010", "1:30", "2024-01-01")),
        *((text, text) for text in ("a: b", "a #b", "*a", "|", "!x")),
        ("1e3", 1000.0),
        (".5", 0.5),
        ("-1_000", -1000),
        ("0x1F", 31),
        ("True", True),
        ("", None),
        ("~", None),
        (" [1, {a: 1e-6}] ", [1, {"a": 1e-6}]),
        ('"1"', "1"),
        ("'a: b'", "a: b"),
    ],
)  # fmt: skip
def test_an_override_is_what_was_typed(tmp_path, typed, read):
    config = load(tmp_path, "model: demo", f"workers.engine_args.a={typed}")
    assert config.workers.engine_args == {"a": read}
    assert type(config.workers.engine_args["a"]) is type(read)


@pytest.mark.parametrize("typed", ["'a", '"a"b', "<<", "[1", "\x01"])
def test_an_override_that_cannot_be_read_is_refused_and_says_how_to_quote(tmp_path, typed):
    line = r"--set model=.* is not a YAML value .*; text is written as --set 'model="
    with pytest.raises(ConfigError, match=line) as error:
        load(tmp_path, "model: demo", f"model={typed}")
    assert "\n" not in str(error.value)


def test_an_empty_name_has_its_own_value():
    from orchestrator.config.settings import value_at

    tree = {"limits": {"shares": {"": 1.0, "b": 2.0}}}
    assert value_at(tree, "limits.shares.") == 1.0 and value_at(tree, "limits.shares") == tree["limits"]["shares"]


def test_every_number_of_a_file_that_a_launcher_writes_is_read_again():
    """As JSON has it, whose `1e-06` is text in YAML 1.1."""
    numbers = {"eps": 1e-6, "large": 1e22, "small": -5e-324, "int": -3, "half": 0.5}
    assert load_yaml(msgspec.json.encode(numbers).decode()) == numbers


def test_what_a_section_takes_over_from_another_may_be_said_anew(tmp_path):
    text = "model: demo\nworkers:\n  prefill: &p {replicas: 2}\n  decode:\n    <<: *p\n    replicas: 3"
    workers = load(tmp_path, text).workers
    assert (workers.prefill.replicas, workers.decode.replicas) == (2, 3)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"gone\.yaml: cannot be read \(No such file"):
        load_config(tmp_path / "gone.yaml")


def test_workers_whose_kv_could_not_be_exchanged_are_refused(tmp_path):
    text = "model: demo\nworkers: {decode: {engine_args: {block_size: 32}}}"
    with pytest.raises(ConfigError, match=r"workers\.decode\.engine_args\.block_size: 32 for decode, and None"):
        check_engine_args(load(tmp_path, text))
    check_engine_args(load(tmp_path, text, "workers.prefill.replicas=0"))


def test_the_list_of_keys_has_each_with_type_and_default():
    keys = {key: (kind, default) for key, kind, default in config_keys(Config)}
    assert keys["model"] == ("text", "required")
    assert keys["workers.prefill.replicas"] == ("integer >= 0 <= 10000", "1")
    assert keys["engine"] == ("vllm | sim", "vllm")
    assert keys["redis.timeout_s"][0] == "number >= 0.0001 <= 1e6"
    assert all(kind for kind, _ in keys.values())


def test_keys_are_grouped_by_how_often_people_need_them():
    groups = Counter(how_often(key) for key, _, _ in config_keys(Config))
    assert groups[OFTEN] == len(_OFTEN), "each of them exists"
    assert groups.keys() == {OFTEN, SOMETIMES, SELDOM} and groups[OFTEN] < 25


def test_every_number_has_a_lower_and_an_upper_bound():
    kinds = {key: kind for key, kind, _ in config_keys(Config) if kind.startswith(("number", "integer"))}
    assert [key for key, kind in kinds.items() if ">" not in kind or "<" not in kind] == []


def test_pipeline_stages_are_for_prefill_workers(tmp_path):
    stages = "engine_args: {pipeline_parallel_size: 2}"
    check_engine_args(load(tmp_path, f"model: demo\nworkers: {{prefill: {{{stages}}}}}"))
    for section, key in ((stages, ""), (f"decode: {{{stages}}}", "decode.")):
        with pytest.raises(ConfigError, match=f"s.{key}engine_args.pipeline_parallel_size: expected 1, got 2; split"):
            check_engine_args(load(tmp_path, f"model: demo\nworkers: {{{section}}}"))


def test_ranks_that_share_prompts_are_for_decode_workers(tmp_path):
    shares = "engine_args: {decode_context_parallel_size: 2}"
    own = f"decode: {{{shares}}}"
    check_engine_args(load(tmp_path, f"model: demo\nkv: {{verify: true}}\nworkers: {{{own}}}"))
    check_engine_args(
        load(tmp_path, f"model: demo\nkv: {{verify: true}}\nworkers: {{{shares}, prefill: {{replicas: 0}}}}")
    )
    refused = {
        shares: r"workers.engine_args.decode_\w+: expected 1, got 2; a prefill worker sends whole prompts; set it in w",
        f"prefill: {{{shares}}}": r"workers.prefill.engine_args.decode_\w+: expected 1, got 2; .* in workers.decode",
        f"{own}, prefill: {{engine_args: {{pipeline_parallel_size: 2}}}}": r"workers.decode.engine_args.decode_\w+: 2 "
        r"ranks cannot share prompts of 2 stages: set decode_\w+ or workers.prefill.engine_args.pipeline_\w+ to 1",
    }
    for section, line in refused.items():
        with pytest.raises(ConfigError, match=line):
            check_engine_args(load(tmp_path, f"model: demo\nkv: {{verify: true}}\nworkers: {{{section}}}"))


@pytest.mark.parametrize("key", [key for key in _INSTEAD if key != "models"])
def test_a_key_that_was_removed_has_a_line_of_its_own(key):
    tree: dict[str, Any] = {}
    for name in reversed(key.split(".")):
        tree = {name: tree or 1}
    with pytest.raises(ConfigError, match=rf"^{key}: unknown key; (remove it|use |set |it is )"):
        parse_config({"model": "demo", **tree})


def test_off_is_text_in_file_and_command_line(tmp_path):
    """YAML 1.1 reads it as false, and so did `ratio.mode: off` fail."""
    file = tmp_path / "config.yaml"
    file.write_text("model: demo\nratio: {mode: off}\nkv: {verify: True}\n")
    config = load_config(file, ["slo.admission=off", "frontend.dashboard=false"])
    assert (config.ratio.mode, config.slo.admission, config.kv.verify) == ("off", "off", True)
    assert config.frontend.dashboard is False


def test_open_mesh_needs_loopback_or_trust_network(tmp_path):
    open_mesh = "model: demo\nsecurity: {mesh: none}"
    for host in ("127.0.0.1", "::1", "localhost"):
        assert load(tmp_path, open_mesh, f"workers.bind='{host}'").security.mesh == "none"
    assert load(tmp_path, open_mesh, "workers.bind=10.0.0.5", "security.trust_network=true").workers.bind == "10.0.0.5"
    assert load(tmp_path, "model: demo", "workers.bind=10.0.0.5").security.mesh == "curve"


@pytest.mark.parametrize("text", ["a: " + "1" * 5000, "a: !!int x", "[" * 1000, b"\x80".decode("latin-1")])
def test_invalid_yaml_is_refused_with_file_name(tmp_path, text):
    file = tmp_path / "fleet.yaml"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=str(file)):
        load_config(file)


SECTIONS = [field.name for field in msgspec.structs.fields(Config)]
KEYS = sorted(
    {
        key.name
        for field in msgspec.structs.fields(Config)
        if hasattr(field.type, "__struct_fields__")
        for key in msgspec.structs.fields(field.type)
    }
)


@settings(max_examples=200)
@given(
    st.dictionaries(
        st.sampled_from(SECTIONS) | st.text(max_size=4),
        values | st.dictionaries(st.sampled_from(KEYS), values, max_size=3),
        max_size=3,
    )
)
def test_any_values_are_a_configuration_or_refused_with_the_key(section):
    with contextlib.suppress(ConfigError):
        parse_config({"model": "m", **section})


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=100) | st.text(max_size=60).map(str.encode))
def test_any_file_is_a_configuration_or_refused(tmp_path, content):
    file = tmp_path / "fleet.yaml"
    file.write_bytes(content)
    with contextlib.suppress(ConfigError):
        load_config(file)


@pytest.fixture
def fifo(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    return tmp_path / "fifo"


def test_what_is_no_plain_file_is_refused_unread(tmp_path, fifo):
    """Nobody writes into the FIFO, and /dev/zero has no end."""
    for path in (fifo, Path("/dev/zero"), tmp_path):
        with pytest.raises(ConfigError, match=rf"^{path}: cannot be read \((Not a regular file|Is a directory)\)"):
            load_config(path)
        for section in (f"security: {{api_keys_file: {path}}}", f"frontend: {{server_args: {{ssl_certfile: {path}}}}}"):
            with pytest.raises(ConfigError, match="expected a file"):
                check_engine_args(load(tmp_path, f"model: demo\n{section}"))


def test_a_huge_file_is_refused(tmp_path):
    with (tmp_path / "huge.yaml").open("wb") as file:
        file.truncate(1 << 30)
    with pytest.raises(ConfigError, match=r"huge\.yaml: cannot be read \(It has more than 262144 bytes\)"):
        load_config(tmp_path / "huge.yaml")


@pytest.mark.parametrize("repeat", ["[{}]", "{{<<: [{}]}}"], ids=["lists", "merges"])
def test_aliases_cannot_multiply_a_file(tmp_path, repeat):
    """Nine of nine, eleven times over, are 31 billion values."""
    lines = ["a0: &a0 {x: 1}"]
    lines += [f"a{i}: &a{i} {repeat.format(','.join([f'*a{i - 1}'] * 9))}" for i in range(1, 12)]
    for bomb in (lines, ["a0: &a0 {b: *a0}"]):
        with pytest.raises(ConfigError, match="more than 100000 values, with what its aliases"):
            load(tmp_path, "model: demo\nworkers:\n  engine_args:\n" + "\n".join(f"    {line}" for line in bomb))


def test_a_refused_value_is_shown_in_short_and_without_its_password(tmp_path):
    for value, got in (("a" * 100_000, "aaa"), ("0x" + "f" * 20_000, "an integer of 80000 bits")):
        with pytest.raises(ConfigError, match=got) as caught:
            load(tmp_path, f"model: demo\nfrontend: {{port: {value}}}")
        assert len(str(caught.value)) < 300
    with pytest.raises(ConfigError, match=r"^redis\.url: .*got 'redix://:\*\*\*@10\.0\.0\.1'") as caught:
        load(tmp_path, "model: demo\nredis: {url: 'redix://:hidden@10.0.0.1'}")
    assert "hidden" not in str(caught.value)


MIXTRAL = {"num_attention_heads": 8, "num_hidden_layers": 2, "num_local_experts": 4}
DENSE = {"num_attention_heads": 9, "num_hidden_layers": 30, "num_experts": 0}
SEES = {"text_config": {"num_attention_heads": 12, "num_hidden_layers": 4}, "vision_config": {"num_attention_heads": 5}}


@pytest.mark.parametrize(
    ("model", "more", "line"),
    [
        (
            DENSE,
            "{engine_args: {enable_expert_parallel: true}}",
            "workers.engine_args.enable_expert_parallel: this model has no experts; remove it",
        ),
        (
            DENSE,
            "{decode: {engine_args: {enable_expert_parallel: true}}}",
            "workers.decode.engine_args.enable_expert_parallel: this model has no experts; remove it",
        ),
        (
            DENSE,
            "{engine_args: {tensor_parallel_size: 2}}",
            "workers.engine_args.tensor_parallel_size: 2 ranks cannot share this model's 9 attention heads; "
            "use 1, 3, 9",
        ),
        (
            SEES,
            "{prefill: {engine_args: {tensor_parallel_size: 5}}}",
            "workers.prefill.engine_args.tensor_parallel_size: 5 ranks cannot share this model's 12 attention heads; "
            "use 1, 2, 3, 4, 6, 12",
        ),
        (
            MIXTRAL,
            "{engine_args: {data_parallel_size: 3, tensor_parallel_size: 2, enable_expert_parallel: true}}",
            "workers.engine_args.data_parallel_size: 3 x 2 ranks cannot share this model's 4 experts; "
            "use at most 2, or remove enable_expert_parallel",
        ),
        (
            MIXTRAL,
            "{engine_args: {tensor_parallel_size: true}}",
            "workers.engine_args.tensor_parallel_size: expected an integer >= 1, got True",
        ),
        (
            MIXTRAL,
            "{prefill: {engine_args: {pipeline_parallel_size: 3}}}",
            "workers.prefill.engine_args.pipeline_parallel_size: this model's 2 layers are too few for 3 stages; "
            "use at most 2",
        ),
    ],
)
def test_sizes_that_do_not_fit_the_model_are_refused(tmp_path, model, more, line):
    (tmp_path / "config.json").write_text(json.dumps(model))
    with pytest.raises(ConfigError) as refused:
        check_engine_args(load(tmp_path, f"model: {tmp_path}\nworkers: {more}"))
    assert str(refused.value) == line


@pytest.mark.parametrize(
    ("model", "more"),
    [
        (MIXTRAL, "{engine_args: {enable_expert_parallel: true, tensor_parallel_size: 4}}"),
        ({"blocks": [{"n_routed_experts": 8}]}, "{engine_args: {enable_expert_parallel: true}}"),
        ({}, "{engine_args: {enable_expert_parallel: true}}"),
        (DENSE, "{engine_args: {tensor_parallel_size: 2, hf_overrides: {num_attention_heads: 8}}}"),
        (DENSE, "{prefill: {replicas: 0, engine_args: {tensor_parallel_size: 2}}}"),
    ],
)
def test_sizes_that_fit_or_whose_model_is_not_known_are_taken(tmp_path, model, more):
    (tmp_path / "config.json").write_text(json.dumps(model))
    check_engine_args(load(tmp_path, f"model: {tmp_path}\nworkers: {more}"))
    check_engine_args(load(tmp_path, f"model: some/where-else\nworkers: {more}"))


def test_groups_are_of_any_size(tmp_path):
    sizes = "{prefill: {engine_args: {data_parallel_size: 2}}, decode: {engine_args: {data_parallel_size: 3}}}"
    config = load(tmp_path, f"model: demo\nworkers: {sizes}", "ratio.mode=off")
    check_engine_args(config)
    assert [group_size(config, role) for role in (Role.PREFILL, Role.DECODE)] == [2, 3]
    automatic = load(tmp_path, "model: demo\nworkers: {engine_args: {data_parallel_size: 2}}", "ratio.mode=auto")
    check_engine_args(automatic)
    assert unit_size(automatic) == 2


def test_group_on_a_ray_cluster_needs_a_network_of_its_own(tmp_path):
    tree = "model: demo\nworkers: {engine_args: {data_parallel_size: 2}}"
    ray = ("launcher.kind=ray", "redis.url=redis://h", "ratio.mode=off")
    with pytest.raises(ConfigError, match=r"data_parallel_size: 2: on a Ray cluster .*security.trust_network"):
        check_engine_args(load(tmp_path, tree, *ray))
    check_engine_args(load(tmp_path, tree, *ray, trusted := "security.trust_network=true"))
    check_engine_args(load(tmp_path, tree, *ray, trusted, "workers.decode.engine_args.data_parallel_size=4"))


@pytest.mark.parametrize(
    ("argument", "others", "said"),
    [
        ("data_parallel_size: 0", "", "expected an integer >= 1, got 0"),
        ("data_parallel_size: two", "", "expected an integer >= 1, got 'two'"),
        ("data_parallel_size: 4", "", "4 for {role}, and 1 for {other}: ratio.mode auto"),
        ("data_parallel_size: 4", "data_parallel_size: 2", "4 for {role}, and 2 for {other}: ratio.mode auto"),
        ("dtype: float32", "dtype: bfloat16", "'float32' for {role}, and 'bfloat16' for {other}; set it once"),
        ("logprobs_mode: processed_logprobs", "", "'processed_logprobs' for {role}, and None for {other}; set it once"),
        ("logits_processors: ['a:b']", "", "['a:b'] for {role}, and None for {other}; set it once"),
    ],
)
@pytest.mark.parametrize(("role", "other"), [("prefill", "decode"), ("decode", "prefill")])
def test_a_value_that_is_refused_is_named_where_it_is_set(tmp_path, argument, others, said, role, other):
    tree = f"model: demo\nworkers: {{engine_args: {{{others}}}, {role}: {{engine_args: {{{argument}}}}}}}"
    with pytest.raises(ConfigError) as refused:
        check_engine_args(load(tmp_path, tree))
    key = f"workers.{role}.engine_args.{argument.partition(':')[0]}"
    assert f"{key}: {said.format(role=role, other=other)}" in str(refused.value)


def test_a_common_value_that_one_role_cannot_have_is_named_where_it_is_set(tmp_path):
    for tree, said in (
        ("{engine_args: {data_parallel_size: 2}, decode: {engine_args: {data_parallel_size: 2}}}", "decode."),
        ("{engine_args: {data_parallel_size: 2}}", ""),
    ):
        sets = ("launcher.kind=ray", "redis.url=redis://h", "workers.prefill.replicas=0", "ratio.mode=off")
        with pytest.raises(ConfigError, match=f"workers.{said}engine_args.data_parallel_size: 2: on a Ray cluster"):
            check_engine_args(load(tmp_path, f"model: demo\nworkers: {tree}", *sets))
