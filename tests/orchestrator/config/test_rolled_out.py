"""What a rollout may change: the new file against what runs."""

from pathlib import Path
from typing import Any

import pytest

from orchestrator.config.settings import ConfigError, Refused, parse_config
from orchestrator.config.shared import changed, changes, merged, shared
from orchestrator.launch.commands import resolve
from orchestrator.store.configuration import Version

FILE: dict[str, Any] = {
    "model": "demo",
    "namespace": "fleet",
    "engine": "vllm",
    "frontend": {"port": 0, "server_args": {"tool_call_parser": "hermes"}},
    "workers": {"engine_args": {"max_model_len": 4096}, "prefill": {"replicas": 1}, "decode": {"replicas": 2}},
}
RUNNING = resolve(parse_config(FILE), "/models/demo", "redis://h:1", 8123)
VERSION = Version(3, shared(RUNNING))


def with_(**sections: Any) -> dict[str, Any]:
    return FILE | sections


def test_rollout_changes_arguments_revision_and_policies():
    arguments = {"max_model_len": 8192, "revision": "v2", "max_num_seqs": 8}
    workers = {"engine_args": arguments, "prefill": {"replicas": 7}, "decode": {"replicas": 9}}
    new = changed(VERSION.config, RUNNING, with_(workers=workers, routing={"decode_choice": "round_robin"}))
    config = merged(RUNNING, new)
    assert config.workers.engine_args == arguments and config.routing.decode_choice == "round_robin"
    assert config.model == "demo", "each launcher looks for it"
    assert config.served_model_name == "demo" and config.namespace == "fleet"
    assert (config.workers.prefill.replicas, config.workers.decode.replicas) == (1, 2), "`scale` says how many"
    assert config.frontend == RUNNING.frontend and config.redis == RUNNING.redis and config.security == RUNNING.security


def test_rollout_shows_changes_without_secrets():
    """Also what the fleet was started with by `--set`, and the new file lacks."""
    started = resolve(parse_config(FILE | {"ratio": {"mode": "off"}}), "/models/demo", "redis://h:1", 8123)
    running = Version(3, shared(started))
    arguments = {"max_num_seqs": 8, "hf_token": "hf_secret"}
    workers = FILE["workers"] | {"engine_args": arguments, "env": {"HF_TOKEN": "hf_secret"}}
    assert list(changes(running.config, changed(running.config, started, with_(workers=workers)))) == [
        "workers.engine_args.max_model_len: 4096 -> (unset)",
        "workers.engine_args.max_num_seqs: (unset) -> 8",
        "workers.engine_args.hf_token: (unset) -> '***'",
        "workers.env.HF_TOKEN",
        "ratio.mode: 'off' -> 'auto'",
    ]
    assert list(changes(running.config, changed(running.config, started, with_(ratio={"mode": "off"})))) == []


def test_another_name_of_the_same_model_is_no_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Clients know the model by a name of its own."""
    monkeypatch.setattr("orchestrator.config.model._demo_name", lambda: "Small-1")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path / "Small-1")
    file = FILE | {"served_model_name": "mine"}

    def told(found: str, named: str) -> list[str]:
        started = resolve(parse_config(file), found, "redis://h:1", 8123)
        return list(changes(shared(started), changed(shared(started), started, file | {"model": named})))

    folder = str(tmp_path / "Small-1")
    for found, named in ((folder, "demo"), ("demo", folder), (folder, "./Small-1"), (folder, "link"), ("a/b", "a/b")):
        assert told(found, named) == []
    for found, named in (("/models/Large", "demo"), (folder, "/other/Small-1"), ("a/b", "a/c")):
        assert told(found, named) == [f"model: {found!r} -> {named!r}"]


@pytest.mark.parametrize(
    ("sections", "why"),
    [
        ({"model": "other"}, "clients know the model as 'demo', not 'other'"),
        ({"engine": "sim"}, r"engine: a rollout cannot change it \('vllm' now\)"),
        ({"frontend": {"port": 9000}}, "frontend.port: a rollout cannot change it"),
        ({"frontend": {"server_args": {"tool_call_parser": "mistral"}}}, "frontend.server_args.tool_call_parser: a"),
        ({"frontend": {"server_args": {"middleware": ["a.b"]}}}, r"middleware: a rollout cannot change it \(unset now"),
        ({"workers": {"labels": {"zone": "b"}}}, r"workers.labels.zone: a rollout cannot change it \(unset now"),
        ({"redis": {"url": "redis://other:1"}}, "redis.url: a rollout cannot change it"),
        ({"launcher": {"kind": "ray"}, "redis": {"url": "redis://h:1"}}, "launcher.kind: a rollout cannot change it"),
        ({"security": {"mesh": "none"}}, "security.mesh: a rollout cannot change it"),
        ({"workers": {"bind": "10.0.0.1"}}, "workers.bind: a rollout cannot change it"),
        ({"workers": {"engine_args": {"max_model_len": 1024}}}, "max_model_len: 1024 instead of 4096"),
    ],
)
def test_fixed_keys_are_refused_by_name(sections: dict[str, Any], why: str):
    with pytest.raises(Refused, match=why):
        changed(VERSION.config, RUNNING, with_(**sections))


def test_names_with_dots_are_as_they_were():
    """Those of tenants and labels may have some."""
    sections = {"limits": {"shares": {"acme.com": 2.0, "acme": 1.0}}}
    started = parse_config(FILE | sections | {"served_model_name": "demo"})
    assert changed(shared(started), started, with_(**sections))
    other = {"limits": {"shares": {"acme.com": 3.0, "acme": 1.0}}}
    with pytest.raises(Refused, match=r"limits.shares.acme.com: a rollout cannot change it \(2.0 now\)"):
        changed(shared(started), started, with_(**other))


@pytest.mark.parametrize(
    "sections",
    [{"security": {"api_keys": ["new"]}}, {"redis": {"url": "redis://h:2"}}, {"security": {"operator_key": "new"}}],
)
def test_what_is_refused_shows_no_secret(sections: dict[str, Any]):
    secrets = {"api_keys": ["hidden"], "operator_key": "hidden"}
    running = resolve(parse_config(FILE | {"security": secrets}), "/models/demo", "redis://:hidden@h:1", 8123)
    with pytest.raises(Refused, match=r"a rollout cannot change it \(.*\*\*\*.* now\)") as refused:
        changed(VERSION.config, running, with_(**sections))
    assert "hidden" not in str(refused.value)


def test_new_frontends_need_the_port_of_the_old_ones():
    on_ray = FILE | {"launcher": {"kind": "ray"}, "redis": {"url": "redis://h:1"}}
    running = resolve(parse_config(on_ray), "demo", "redis://h:1", 0)
    with pytest.raises(Refused, match="frontend.port: 0 on Ray"):
        changed(VERSION.config, running, on_ray)


def test_rollout_without_original_file_compares_shared_part():
    with pytest.raises(Refused, match="security.mesh: a rollout cannot change it"):
        changed(VERSION.config, None, with_(security={"mesh": "none"}))
    assert changed(VERSION.config, None, with_(frontend={"port": 9000}))["model"] == "demo"


def test_mistake_in_file_is_configuration_error():
    with pytest.raises(ConfigError, match="workers.engine_args.max_num_seq: not an argument"):
        changed(VERSION.config, RUNNING, with_(workers={"engine_args": {"max_num_seq": 8}}))
