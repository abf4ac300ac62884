"""Settings with which KV would be lost or wrong are refused before a model is loaded, in one line with the mend."""

import shutil
import tomllib
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support_vllm import tiny_model

from orchestrator.cli.doctor.fleet import first_difference
from orchestrator.config.settings import KVConfig

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), heads=12, kv_heads=6, hidden=96)


def build(model: Path, kv: KVConfig = KVConfig(), **engine_args: Any) -> Any:
    from workers.vllm_engine.launch import Setup, build_config

    arguments = {"skip_tokenizer_init": True, "dtype": "float32", "max_model_len": 512} | engine_args
    where = {"kv_host": "127.0.0.1", "kv_advertise": "127.0.0.1", "kv_port": 1}
    return build_config(Setup(model=str(model), engine_args=arguments, engine_id="e", kv=kv, **where))


def test_supported_configuration_is_built(model: Path) -> None:
    for ranks in (1, 3, 12):
        assert build(model, tensor_parallel_size=ranks).parallel_config.tensor_parallel_size == ranks


def test_config_section_is_read_like_command_line(model: Path) -> None:
    sections = {"structured_outputs_config": {"backend": "guidance"}, "profiler_config": {"profiler": None}}
    assert build(model, **sections).structured_outputs_config.backend == "guidance"
    with pytest.raises(ValueError, match="backend"):
        build(model, structured_outputs_config={"backend": "no such"})


@pytest.mark.parametrize(
    ("engine_args", "line"),
    [
        ({"tensor_parallel_size": 4}, "tensor_parallel_size: 6 KV heads cannot be divided among 4 ranks; choose"),
        ({"data_parallel_size": 2}, "data_parallel_size: 2 ranks, but this worker is one of a group of 1; start one"),
        ({"enable_expert_parallel": True}, "enable_expert_parallel: this model has no experts; remove it"),
    ],
)
def test_engine_arguments_that_lose_kv_are_refused(model: Path, engine_args: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError, match=line):
        build(model, **engine_args)


@pytest.mark.parametrize(
    ("size", "engine_args", "line"),
    [
        (10**12, {}, "kv.host_tier_bytes: 1000000000000 for each of 1 ranks, but this host has .*; lower it"),
        (4096, {"enable_prefix_caching": False}, "kv.host_tier_bytes: .* there is none; set it to 0"),
        (4096, {"pipeline_parallel_size": 3}, "kv.host_tier_bytes: the caches of 3 pipeline stages .*; set it to 0"),
    ],
)
def test_a_host_tier_that_cannot_be_is_refused(model: Path, size: int, engine_args: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError, match=line):
        build(model, KVConfig(host_tier_bytes=size), **engine_args)


def test_an_argument_that_switches_off_what_is_refused_is_taken(model: Path) -> None:
    build(model, enable_return_routed_experts=False, kv_offloading_size=None)


def test_what_frontends_are_told_of_is_collected_whatever_is_switched_off(model: Path) -> None:
    """Durations of steps, and what is cached: without them placement would know nothing of either."""
    built = build(model, enable_logging_iteration_details=False, kv_events_config={"enable_kv_cache_events": False})
    assert built.observability_config.enable_logging_iteration_details
    assert built.kv_events_config.enable_kv_cache_events and built.kv_events_config.publisher == "null"
    own = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": "tcp://*:5601"}
    assert build(model, kv_events_config=own).kv_events_config.endpoint == "tcp://*:5601"


def test_a_worker_tells_of_as_many_places_as_its_scheduler_has(model: Path) -> None:
    """Frontends would send it more than it takes up, to wait there, while another worker has room."""
    from workers.vllm_engine.launch import most_running

    assert most_running(build(model, max_num_seqs=16)) == 16
    assert most_running(build(model, max_num_seqs=16, max_num_active_seqs=4)) == 4


def _routed_experts(config: Any) -> None:
    config.aux_output_config.enable_return_routed_experts = True


def _kv_in_host_memory(config: Any) -> None:
    from vllm.config.attention import HiSparseConfig

    config.attention_config.hisparse_config = HiSparseConfig()


def _sleep_mode(config: Any) -> None:
    config.model_config.enable_sleep_mode = True


@pytest.mark.parametrize(
    ("switch_on", "why"),
    [
        (_routed_experts, "aux_output_config.enable_return_routed_experts: .*; remove it"),
        (_kv_in_host_memory, "attention_config.hisparse_config: .*; remove it"),
        (_sleep_mode, "enable_sleep_mode: sleep would free KV memory .*; remove it"),
    ],
)
def test_what_vllm_refuses_for_this_model_or_on_a_cpu_is_refused_elsewhere(
    model: Path, switch_on: Callable[[Any], None], why: str
) -> None:
    from connectors.push.connector import PushConnector

    config = build(model)
    switch_on(config)
    with pytest.raises(ValueError, match=why):
        PushConnector.refuse_unsupported(config)


def test_nixl_is_asked_for_no_threads_which_would_spin(model: Path) -> None:
    assert build(model).kv_transfer_config.get_from_extra_config("num_threads", 4) == 0


def test_block_in_use_by_running_step_is_not_reserved(model: Path) -> None:
    """With asynchronous scheduling a step may still write the blocks of a request that has ended. vLLM keeps them back
    where this holds: a WRITE from another engine is in no order with the device's work."""
    assert build(model).kv_transfer_config.is_kv_consumer


@pytest.mark.parametrize("name", ["decode_context_parallel_size", "prefill_context_parallel_size"])
def test_context_parallel_is_refused(model: Path, name: str) -> None:
    from connectors.push.connector import PushConnector

    config = build(model)
    setattr(config.parallel_config, name, 2)  # vLLM itself refuses it for this model
    with pytest.raises(ValueError, match=f"{name}: .*expected 1, got 2"):
        PushConnector.refuse_unsupported(config)


@pytest.mark.parametrize(
    ("device", "ranks", "latent", "interleave", "line"),
    [
        ("cpu", 2, True, 16, "decode_context_parallel_size: vLLM has no kernels for it on CPUs, expected 1, got 2"),
        ("cuda", 2, False, 16, "decode_context_parallel_size: .* latent attention, expected 1, got 2"),
        ("cuda", 4, True, 16, "decode_context_parallel_size: .* latent attention, expected 4, got 2"),
        ("cuda", 2, True, 1, "cp_kv_cache_interleave_size: .* expected the block size, 16, got 1"),
        ("cuda", 2, True, 16, ""),
    ],
)
def test_ranks_share_prompts_on_gpus_under_verification(
    model: Path, monkeypatch: pytest.MonkeyPatch, device: str, ranks: int, latent: bool, interleave: int, line: str
) -> None:
    from connectors.push import connector

    config = build(model, kv=KVConfig(verify=True), block_size=16)
    parallel = config.parallel_config
    parallel.decode_context_parallel_size, parallel.tensor_parallel_size = 2, ranks
    parallel.cp_kv_cache_interleave_size = interleave
    monkeypatch.setattr(type(config.model_config), "use_mla", latent)
    monkeypatch.setattr(connector, "current_platform", types.SimpleNamespace(device_type=device))
    config.kv_transfer_config.kv_buffer_device = device
    if not line:
        connector.PushConnector.refuse_unsupported(config)
        return
    with pytest.raises(ValueError, match=line):
        connector.PushConnector.refuse_unsupported(config)


def test_overlapping_batches_are_refused_by_layer_only(model: Path) -> None:
    from connectors.push.connector import PushConnector

    config = build(model)
    config.parallel_config.enable_dbo = True
    PushConnector.refuse_unsupported(config)
    config.kv_transfer_config.kv_connector_extra_config["transfer"] = "layer"
    with pytest.raises(ValueError, match="kv.transfer: .*enable_dbo.*; choose auto"):
        PushConnector.refuse_unsupported(config)


def test_insecure_serialization_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    with pytest.raises(ValueError, match="VLLM_ALLOW_INSECURE_SERIALIZATION: .*; unset it"):
        build(model)


@pytest.mark.parametrize(
    ("device", "buffer", "line"),
    [
        ("cuda", "cpu", "kv_buffer_device: .*expected 'cuda', got 'cpu'; remove the setting"),
        ("xpu", "xpu", "device xpu: KV can be pushed from CUDA devices and CPUs only"),
    ],
)
def test_unsupported_devices_and_buffers_are_refused(
    model: Path, monkeypatch: pytest.MonkeyPatch, device: str, buffer: str, line: str
) -> None:
    from connectors.push import connector

    config = build(model)
    monkeypatch.setattr(connector, "current_platform", types.SimpleNamespace(device_type=device))
    config.kv_transfer_config.kv_buffer_device = buffer
    with pytest.raises(ValueError, match=line):
        connector.PushConnector.refuse_unsupported(config)


@pytest.mark.parametrize("error", [AttributeError("'str' object has no items"), AssertionError("one rank")])
def test_whatever_vllm_raises_for_arguments_is_told_as_their_refusal(
    monkeypatch: pytest.MonkeyPatch, model: Path, error: Exception
) -> None:
    """As an AttributeError for `speculative_config: ngram`. Else a worker would end with a traceback, and be started
    again for ever."""
    from workers.vllm_engine import engine

    def refuse(*arguments: Any) -> None:
        raise error

    monkeypatch.setattr(engine, "build_config", refuse)
    place = {"kv_host": "127.0.0.1", "kv_port": 1, "kv_advertise": "127.0.0.1"}
    setup = engine.Setup(model=str(model), engine_args={}, engine_id="e", kv=KVConfig(), **place)
    with pytest.raises(ValueError, match=f"workers.engine_args: {type(error).__name__}: {error}"):
        engine.VllmEngine(setup)._start_blocking()


def test_the_identity_names_what_must_agree(model: Path) -> None:
    from workers.vllm_engine.identity import identity_of

    config = build(model, revision="abc123", tensor_parallel_size=1)
    one = identity_of("m", config, "CPU_ATTN")
    assert (one.revision, one.quantization, one.attention_backend, one.speculation) == ("abc123", "", "CPU_ATTN", "")
    assert identity_of("m", build(model, revision="abc123", tensor_parallel_size=3), "CPU_ATTN") == one
    many = identity_of("m", build(model, revision="abc123", tensor_parallel_size=12), "CPU_ATTN")
    assert first_difference(many, one) == "kv_copies" and (many.kv_copies, one.kv_copies) == (2, 1)
    other = identity_of("m", build(model, revision="abc123", hf_overrides={"rope_theta": 5.0}), "CPU_ATTN")
    assert first_difference(other, one) == "kv_settings"
    assert '"hf_overrides":{"rope_theta":5.0}' in other.kv_settings and "hf_overrides" not in one.kv_settings


def test_the_identity_names_the_files_of_a_model(model: Path, tmp_path: Path) -> None:
    """Also where they are replaced under one name, and have the same sizes."""
    from workers.vllm_engine.identity import identity_of

    config = build(model)

    def weights(folder: Path | str) -> str:
        return identity_of(str(folder), config, "CPU_ATTN").weights

    copied = Path(shutil.copytree(model, tmp_path / "copied"))
    (copied / "README.md").write_text("A copy.")
    (file,) = copied.glob("*.safetensors")
    before = file.read_bytes()
    middle, end = len(before) // 2, len(before) - 1
    seen = [weights(model), weights(copied)]
    assert seen[0] == seen[1] != ""
    for begin, size in ((middle, len(before) // 50), (0, 10)):  # a fiftieth of the weights; the names of tensors
        changed = bytes(255 - byte for byte in before[begin : begin + size])
        file.write_bytes(before[:begin] + changed + before[begin + size :])
        seen.append(weights(copied))
    file.write_bytes(before[:end])
    seen.append(weights(copied))
    file.write_bytes(before)
    assert weights(copied) == seen[0]
    (copied / "config.json").write_text((model / "config.json").read_text().replace("10000.0", "20000.0"))
    seen.append(weights(copied))
    assert len(set(seen)) == len(seen) - 1
    assert weights("organisation/model") == ""


def test_every_setting_that_the_table_of_connector_checks_calls_refused_is_tried_here() -> None:
    rows = tomllib.loads((Path(__file__).parents[2] / "vllm_contract" / "connector_checks.toml").read_text()).values()
    arguments = Path(__file__).parents[2] / "orchestrator" / "cli" / "test_refusals.py"
    here = Path(__file__).read_text() + arguments.read_text()
    refused = {name for row in rows for name in row.get("refused", ())}
    assert refused and {name for name in refused if f'"{name}' not in here} == set()
