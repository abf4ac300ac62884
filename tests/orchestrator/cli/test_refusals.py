"""What the file alone decides is refused by every command before any process starts, with the line of the key."""

import contextlib
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from support_wait import DEADLINE_S

from orchestrator.cli.config import checked_models
from orchestrator.config.engine_args import check_environment
from orchestrator.config.settings import ConfigError
from orchestrator.config.yaml_text import line_of
from orchestrator.types import Role
from workers.arguments import parse

ENGINE = "workers.engine_args"
REFUSED = [
    ("data_parallel_rank: 1", f"{ENGINE}.data_parallel_rank: is set by the fleet; set data_parallel_size alone"),
    ("decode_context_parallel_size: 2", f"{ENGINE}.decode_context_parallel_size: .* got 2; set kv.verify: true"),
    ("prefill_context_parallel_size: 4", f"{ENGINE}.prefill_context_parallel_size: .*expected 1, got 4"),
    ("enable_sleep_mode: true", f"{ENGINE}.enable_sleep_mode: sleep would free KV memory .*; remove it"),
    ("kv_offloading_size: 4", f"{ENGINE}.kv_offloading_size: vLLM would put its own .*; remove it"),
    ("kv_offloading_backend: lmcache", f"{ENGINE}.kv_offloading_backend: vLLM would put .*; remove it"),
    ("enable_return_routed_experts: true", f"{ENGINE}.enable_return_routed_experts: the experts of .*; remove it"),
    ("nnodes: 2", f"{ENGINE}.nnodes: a worker is on one host, expected 1, got 2; data_parallel_size spans several"),
    ("enable_elastic_ep: true", f"{ENGINE}.enable_elastic_ep: a group keeps its ranks .*; remove it"),
    ("enable_fault_tolerance: true", f"{ENGINE}.enable_fault_tolerance: an engine would end .*; remove it"),
    ("fault_tolerance_config: {}", f"{ENGINE}.fault_tolerance_config: an engine would end .*; remove it"),
    (
        "aux_output_config: {enable_return_routed_experts: true}",
        f"{ENGINE}.aux_output_config.enable_return_routed_experts: the experts of .*; remove it",
    ),
    ("attention_config: {hisparse_config: {}}", f"{ENGINE}.attention_config.hisparse_config: KV in host .*; remove it"),
    ("distributed_executor_backend: ray", f"{ENGINE}.distributed_executor_backend: its ranks .* got 'ray'; remove it"),
    ("distributed_executor_backend: external_launcher", f"{ENGINE}.distributed_executor_backend: its .*; remove it"),
    ("distributed_executor_backend: my.Executor", f"{ENGINE}.distributed_executor_backend: .*mp or uni, got 'my.Exec"),
    ("scheduler_cls: my.Scheduler", f"{ENGINE}.scheduler_cls: another one may reuse .* got 'my.Scheduler'; remove it"),
    ("ec_transfer_config: {ec_role: ec_producer}", f"{ENGINE}.ec_transfer_config: the engines .*; remove it"),
    ("mm_encoder_only: true", f"{ENGINE}.mm_encoder_only: the engines that compute .*; remove it"),
    ("shutdown_timeout: 60", f"{ENGINE}.shutdown_timeout: is set by the fleet; use the key launcher.stop_timeout_s"),
    ("otlp_traces_endpoint: 'http://h'", f"{ENGINE}.otlp_traces_endpoint: .*; use the key frontend.otlp_endpoint"),
    ("log_config_file: l.json", f"{ENGINE}.log_config_file: is set by the fleet; use the key logging.format"),
    ("log_level: DEBUG", f"{ENGINE}.log_level: is set by the fleet; use the variable VLLM_LOGGING_LEVEL"),
    ("_api_process_count: 2", f"{ENGINE}._api_process_count: not an argument of this vLLM"),
    ("kv_transfer_config: {}", f"{ENGINE}.kv_transfer_config: is set by the fleet; use the key kv.transfer"),
    ("no_such_argument: 1", f"{ENGINE}.no_such_argument: not an argument of this vLLM"),
    ("pipeline_parallel_size: 2", f"{ENGINE}.pipeline_parallel_size: expected 1, got 2"),
]


def written(tmp_path: Path, argument: str, more: str = "") -> Path:
    file = tmp_path / "fleet.yaml"
    file.write_text(f"model: demo\nredis: {{url: 'redis://h'}}\nworkers:\n  engine_args:\n    {argument}\n{more}")
    return file


@pytest.mark.parametrize(("argument", "line"), REFUSED)
def test_engine_arguments_are_refused_alike(tmp_path: Path, argument: str, line: str) -> None:
    file = written(tmp_path, argument)
    of_vllm = any(name in argument for name in ("no_such", "_api_process", "pipeline"))
    if of_vllm and importlib.util.find_spec("vllm") is None:
        pytest.skip("its arguments are read from vLLM's source")
    with pytest.raises(ConfigError, match=rf"fleet\.yaml, line {5 if ENGINE in line else 3}: {line}"):
        checked_models(file)
    with pytest.raises(ConfigError, match=line):
        parse(Role.DECODE, ["--config", str(file)])


@pytest.mark.parametrize(
    ("more", "line"),
    [
        ("kv:\n  transfer: layer\n", "line 7: kv.transfer: by layer .*enable_dbo.*; choose auto"),
        ("kv: {transfer: chunk}\n", ""),
    ],
)
def test_overlapping_batches_are_refused_by_layer_only(tmp_path: Path, more: str, line: str) -> None:
    file = written(tmp_path, "enable_dbo: true", more)
    if line:
        with pytest.raises(ConfigError, match=line):
            checked_models(file)
    else:
        checked_models(file)


@pytest.mark.parametrize(
    ("argument", "more", "line"),
    [
        ("dtype: float32", "host_tier_bytes: -1", "expected an integer >= 0, got -1"),
        ("dtype: float32", "host_tier_bytes: 4 GiB", "expected an integer, got '4 GiB'"),
        (
            "enable_prefix_caching: false",
            "host_tier_bytes: 4096",
            "it keeps what .* there is none; set it to 0",
        ),
        ("pipeline_parallel_size: 2", "host_tier_bytes: 4096", "the caches of 2 pipeline stages .*; set it to 0"),
        ("dtype: float32", "host_tier_bytes: 4096\nengine: sim", "the simulated engine has no .*; set it to 0"),
        ("enable_prefix_caching: false", "host_tier_bytes: 0", ""),
        ("enable_prefix_caching: true", "host_tier_bytes: 4096", ""),
    ],
)
def test_a_host_tier_that_could_keep_nothing_is_refused(tmp_path: Path, argument: str, more: str, line: str) -> None:
    file = written(tmp_path, argument, f"kv:\n  {more}\n")
    if line:
        with pytest.raises(ConfigError, match=f"line 7: kv.host_tier_bytes: {line}"):
            checked_models(file)
    else:
        checked_models(file)


def test_what_is_switched_off_is_taken(tmp_path: Path) -> None:
    checked_models(
        written(tmp_path, "{enable_return_routed_experts: false, kv_offloading_size: null, enable_sleep_mode: false}")
    )
    checked_models(written(tmp_path, "{distributed_executor_backend: null, scheduler_cls: null}"))
    checked_models(written(tmp_path, "distributed_executor_backend: mp"))


def test_environment_that_unpickles_is_refused(tmp_path: Path) -> None:
    file = written(tmp_path, "dtype: float32", '  env: {VLLM_ALLOW_INSECURE_SERIALIZATION: "1"}\n')
    with pytest.raises(ConfigError, match="VLLM_ALLOW_INSECURE_SERIALIZATION: .*; unset it"):
        checked_models(file)


def test_an_environment_in_which_requests_may_have_the_same_id_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("0", "1"):
        monkeypatch.setenv("VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", value)
        with contextlib.nullcontext() if value == "0" else pytest.raises(ConfigError, match="never be answered; unset"):
            check_environment()


@pytest.mark.parametrize("level", ["loud", ""])
def test_a_log_level_that_there_is_not_is_refused_before_each_process_would_end_at_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, level: str
) -> None:
    for known in ("debug", "ERROR"):
        monkeypatch.setenv("PD_LOG_LEVEL", known)
        check_environment()
    monkeypatch.setenv("PD_LOG_LEVEL", level)
    with pytest.raises(ConfigError, match=f"^PD_LOG_LEVEL: expected DEBUG, .*, got '{level}'; set one, or unset it"):
        checked_models(written(tmp_path, "dtype: float32"))


@pytest.mark.parametrize(
    ("transports", "taken"),
    [
        ("rc,cuda_ipc,sm,self", False),
        ("^tcp", False),
        ("^ib,tcp", False),
        ("rc, tcp", False),
        ("self,all", False),
        ("rc,tcp", True),
        ("rc,\\tcp", True),
        ("all", True),
        ("^ib", True),
    ],
)
def test_engines_without_tcp_connections_are_refused(tmp_path: Path, transports: str, taken: bool) -> None:
    file = written(tmp_path, "dtype: float32", f"  env: {{UCX_TLS: '{transports}'}}\n")
    if taken:
        checked_models(file)
        return
    with pytest.raises(ConfigError, match="UCX_TLS: expected tcp among them"):
        checked_models(file)


def test_transports_are_asked_of_engines_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster's shells may set them for other programs; `workers.env` goes first."""
    monkeypatch.setenv("UCX_TLS", "rc,sm")
    check_environment()
    with pytest.raises(ConfigError, match="UCX_TLS: expected tcp among them"):
        checked_models(written(tmp_path, "dtype: float32"))
    checked_models(written(tmp_path, "dtype: float32", "  env: {UCX_TLS: all}\n"))
    checked_models(written(tmp_path, "max_model_len: 400", "engine: sim\n"))


def test_sequence_of_a_simulated_engine_must_fit(tmp_path: Path) -> None:
    file = written(tmp_path, "num_gpu_blocks_override: 10\n    max_model_len: 400", "engine: sim\n")
    with pytest.raises(ConfigError, match="workers.engine_args.max_model_len: expected at most 160"):
        checked_models(file)


@pytest.mark.parametrize(
    ("backends", "line"),
    [
        ("{LIBFABRIC: {}}", "kv.backends.LIBFABRIC: WRITEs through it cannot be cut off here, .*; use UCX"),
        ("{UCX: {}, GDS_MT: {}}", "kv.backends.GDS_MT: it has no notifications, .*; use UCX"),
        (
            "{UCX: {ucx_error_handling_mode: off_}}",
            "kv.backends.UCX.ucx_error_handling_mode: expected peer, got off_: broken connections",
        ),
        ("[UCX]", "kv.backends: expected a section, got"),
        ("{UCX: {num_workers: [2]}}", "kv.backends.*: expected "),
    ],
)
def test_backends_that_cannot_carry_kv_are_refused(tmp_path: Path, backends: str, line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        checked_models(written(tmp_path, "dtype: float32", f"kv:\n  backends: {backends}\n"))


def test_parameters_of_ucx_are_taken(tmp_path: Path) -> None:
    checked_models(
        written(tmp_path, "dtype: float32", "kv: {backends: {UCX: {num_workers: 2, ucx_devices: mlx5_0}}}\n")
    )


def test_override_is_not_looked_for_in_the_file(tmp_path: Path) -> None:
    file = written(tmp_path, "enable_sleep_mode: false")
    with pytest.raises(ConfigError, match=f"^{ENGINE}.enable_sleep_mode: sleep"):
        checked_models(file, [f"{ENGINE}.enable_sleep_mode=true"])


def test_line_of_a_key_or_of_what_is_there_of_it() -> None:
    text = "a:\n  b: 1\n  c: &x\n    d: 2\ne: *x\n"
    found = {key: line_of(text, key) for key in ("a", "a.b", "a.c.d", "a.c.z", "a.b.z", "e.d", "z", "z.a")}
    assert found == {"a": 1, "a.b": 2, "a.c.d": 4, "a.c.z": 3, "a.b.z": 2, "e.d": 4, "z": 0, "z.a": 0}
    assert line_of("{", "a") == 0


@pytest.mark.slow
@pytest.mark.parametrize("command", [["config", "check"], ["up"], ["rollout"]])
def test_commands_start_nothing(tmp_path: Path, command: list[str]) -> None:
    file = written(tmp_path, "enable_sleep_mode: true")
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "orchestrator.cli.main", *command, str(file)],
        capture_output=True, text=True, timeout=DEADLINE_S, env={"XDG_RUNTIME_DIR": str(tmp_path)}, check=False,
    )  # fmt: skip
    said = [line for line in done.stderr.splitlines() if not line.startswith("import time:")]
    assert done.returncode == 2 and done.stdout == ""
    assert said == [
        line for line in said if line.startswith(f"orchestrator: {file}, line 5: {ENGINE}.enable_sleep_mode")
    ]
    assert len(said) == 1 and "| vllm" not in done.stderr and "| torch" not in done.stderr
    assert list(tmp_path.iterdir()) == [file]
