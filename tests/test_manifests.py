"""`deploy/`: the manifests are what the Kubernetes API takes, and name what our programs and configuration know."""

import functools
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from support_container import DOCKERFILE, image_environment

from orchestrator.config.engine_args import check_engine_args
from orchestrator.config.settings import Config, load_config
from orchestrator.types import Role
from workers.arguments import parse

ROOT = Path(__file__).parents[1]
KUBERNETES = ROOT / "deploy" / "kubernetes"
OVERLAYS = [file.parent for file in sorted(KUBERNETES.rglob("kustomization.yaml"))]
COMPOSE = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())
OLDEST, NEWEST = "1.30", kubernetes_validate.latest_version()
WRITABLE = {"/cache", "/run/pd", "/dev/shm"}
NO_API = ("kustomization.yaml", "fleet.yaml", "values.yaml", "gpu-worker.yaml")  # read by other programs


def written(folder: Path) -> Iterator[dict[str, Any]]:
    """The manifests of a folder as they are in its files."""
    for file in sorted(folder.glob("*.yaml")):
        if file.name not in NO_API:
            yield from yaml.safe_load_all(file.read_text())


@functools.cache
def rendered(folder: Path) -> list[dict[str, Any]]:
    """What `kubectl apply -k` sends."""
    if (kubectl := shutil.which("kubectl")) is None:
        pytest.skip("kubectl is not installed, so overlays cannot be rendered")
    done = subprocess.run([kubectl, "kustomize", str(folder)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


WRITTEN = [manifest for folder in sorted(KUBERNETES.iterdir()) for manifest in written(folder)]
DEPLOYMENTS = [manifest for manifest in WRITTEN if manifest["kind"] == "Deployment"]
OURS = [deployment for deployment in DEPLOYMENTS if deployment["metadata"]["name"] != "pd-redis"]
SERVING = [deployment for deployment in OURS if deployment["metadata"]["name"] != "pd-launcher"]

each_deployment = pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=lambda d: d["metadata"]["name"])
each_of_ours = pytest.mark.parametrize("deployment", OURS, ids=lambda d: d["metadata"]["name"])
each_serving = pytest.mark.parametrize("deployment", SERVING, ids=lambda d: d["metadata"]["name"])
each_overlay = pytest.mark.parametrize("folder", OVERLAYS, ids=lambda folder: folder.name)
each_configuration = pytest.mark.parametrize("folder", ["base", "cuda"])


def pod(deployment: dict[str, Any]) -> dict[str, Any]:
    return deployment["spec"]["template"]["spec"]


def container(deployment: dict[str, Any]) -> dict[str, Any]:
    (only,) = pod(deployment)["containers"]
    return only


def fleet(folder: str = "base") -> Config:
    return load_config(KUBERNETES / folder / "fleet.yaml")


def parsed_worker(args: list[str], config: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The settings of `prefill-worker ...` or `decode-worker ...`, with this file in place of the mounted one."""
    monkeypatch.setenv("PD_REDIS_URL", "redis://:secret@pd-redis:6379")
    program, *options = args
    options[options.index("--config") + 1] = str(config)
    return parse(Role(program.removesuffix("-worker")), options)


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
@pytest.mark.parametrize("manifest", WRITTEN, ids=lambda m: f"{m['kind']}-{m['metadata']['name']}")
def test_manifests_are_valid_for_api(manifest: dict[str, Any], version: str):
    kubernetes_validate.validate(manifest, version, strict=True)


@each_overlay
def test_overlays_make_valid_manifests(folder: Path):
    manifests = rendered(folder)
    assert {m["metadata"]["name"] for m in manifests if m["kind"] == "Deployment"} == {
        "pd-redis", "pd-frontend", "pd-prefill", "pd-decode",
    }  # fmt: skip
    for manifest in manifests:
        kubernetes_validate.validate(manifest, NEWEST, strict=True)


def test_the_cuda_overlay_gives_gpus_and_models_to_workers_and_only_to_them():
    deployments = [m for m in rendered(KUBERNETES / "cuda") if m["kind"] == "Deployment"]
    for deployment in deployments:
        volumes = {volume["name"]: volume for volume in pod(deployment).get("volumes", [])}
        is_worker = deployment["metadata"]["labels"]["app.kubernetes.io/component"] == "worker"
        assert ("nvidia.com/gpu" in container(deployment)["resources"]["limits"]) == is_worker
        assert container(deployment)["image"].endswith(":cuda") == is_worker
        assert ("persistentVolumeClaim" in volumes.get("cache", {})) == is_worker
        for volume in volumes.values():
            assert len(volume) == 2, f"a name and one source: {volume}"


@each_configuration
def test_the_configuration_loads_and_binds_where_pods_are_reached(folder: str, tmp_path: Path):
    config = fleet(folder)
    (keys := tmp_path / "api-keys").write_text("a-key")
    check_engine_args(load_config(KUBERNETES / folder / "fleet.yaml", [f"security.api_keys_file={keys}"]))
    assert config.frontend.host == "0.0.0.0" and config.workers.bind == "auto"
    assert config.redis.url == "embedded", "its URL has a password, and is in no ConfigMap"
    assert config.security.api_keys == [] and config.security.operator_key is None
    assert config.security.mesh == "curve" and config.ratio.mode == "off"


@each_configuration
@each_serving
def test_commands_are_understood(deployment: dict[str, Any], folder: str, monkeypatch: pytest.MonkeyPatch):
    args = container(deployment)["args"]
    mounted = args[args.index("--config") + 1]
    volumes = {mount["mountPath"]: mount["name"] for mount in container(deployment)["volumeMounts"]}
    assert volumes[str(Path(mounted).parent)] == "fleet" and Path(mounted).name == "fleet.yaml"
    if args[0] == "python3":
        assert args[1:4] == ["-m", "orchestrator.frontend.server", "--config"]
        assert container(deployment)["ports"] == [{"name": "http", "containerPort": fleet(folder).frontend.port}]
        return
    settings = parsed_worker(args, KUBERNETES / folder / "fleet.yaml", monkeypatch)
    assert settings.redis_url == "redis://:secret@pd-redis:6379"
    assert container(deployment)["ports"] == [{"name": "health", "containerPort": settings.health_port}]
    assert deployment["spec"]["template"]["metadata"]["labels"]["pd/role"] == settings.role.value


@each_configuration
@each_serving
def test_a_pod_has_the_time_that_it_needs(deployment: dict[str, Any], folder: str):
    config = fleet(folder)
    before = container(deployment).get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
    needs_s = before + config.workers.drain_timeout_s + config.launcher.stop_timeout_s
    assert pod(deployment)["terminationGracePeriodSeconds"] > needs_s
    probe = container(deployment)["startupProbe"]
    if "health" in (port["name"] for port in container(deployment)["ports"]):
        assert probe["periodSeconds"] * probe["failureThreshold"] >= config.workers.start_timeout_s


@each_serving
def test_probes_ask_what_a_process_answers(deployment: dict[str, Any]):
    is_worker = container(deployment)["name"] == "worker"
    paths = {name: container(deployment)[f"{name}Probe"]["httpGet"]["path"] for name in ("liveness", "readiness")}
    assert paths == {"liveness": "/live" if is_worker else "/health", "readiness": "/ready"}


@each_deployment
def test_pods_have_least_privileges(deployment: dict[str, Any]):
    spec, only = pod(deployment), container(deployment)
    assert spec["automountServiceAccountToken"] is False and spec["enableServiceLinks"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True and spec["securityContext"]["runAsUser"] > 0
    assert only["securityContext"] == {
        "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
    }  # fmt: skip
    for variable in only.get("env", []):
        assert "value" not in variable or "$(" in variable["value"] or not re.search("KEY|TOKEN|PASS", variable["name"])
    assert "PASSWORD)" not in " ".join(only.get("args", [])), "a kubelet expands it, and a list of processes shows it"


@each_of_ours
def test_written_paths_are_volumes(deployment: dict[str, Any]):
    sources = {volume["name"]: volume for volume in pod(deployment)["volumes"]}
    mounts = {m["mountPath"] for m in container(deployment)["volumeMounts"] if "emptyDir" in sources[m["name"]]}
    assert mounts >= WRITABLE
    folders = {value for value in image_environment().values() if value.startswith("/")}
    assert all(any(Path(folder).is_relative_to(mount) for mount in WRITABLE) for folder in folders)


def test_network_policies_let_the_mesh_through_and_name_pods_that_exist():
    policies = {m["metadata"]["name"]: m["spec"] for m in WRITTEN if m["kind"] == "NetworkPolicy"}
    labels = [deployment["spec"]["template"]["metadata"]["labels"].items() for deployment in DEPLOYMENTS]

    def selects(selector: dict[str, Any]) -> bool:
        return any(selector["matchLabels"].items() <= of_pod for of_pod in labels)

    for policy in policies.values():
        assert selects(policy["podSelector"])
        assert all(selects(peer["podSelector"]) for rule in policy["ingress"] for peer in rule["from"])
    ((mesh,),) = [rule["ports"] for rule in policies["pd-workers"]["ingress"] if "ports" in rule]
    assert f"{mesh['port']}-{mesh['endPort']}" == fleet("base").workers.ports == fleet("cuda").workers.ports


def test_the_image_copies_what_exists_and_begins_with_an_init():
    text = DOCKERFILE.read_text()
    sources = [source for line in re.findall(r"^COPY (.*)$", text, re.MULTILINE) for source in line.split()[:-1]]
    assert sources and [source for source in sources if not (ROOT / source).exists()] == []
    let_through = DOCKERFILE.with_name("Dockerfile.dockerignore").read_text().splitlines()
    assert all(f"!{source.partition('/')[0]}" in let_through for source in sources)
    assert json.loads(re.findall(r"^ENTRYPOINT (.*)$", text, re.MULTILINE)[0]) == ["/usr/bin/tini", "--"]
    assert re.findall(r"^USER (.*)$", text, re.MULTILINE) == ["10001:10001"]
    (of_cuda,) = re.findall(r"vllm/vllm-openai:v(\S+)", text)
    assert f"vllm=={of_cuda}" in (ROOT / "pyproject.toml").read_text()


@pytest.mark.parametrize("service", ["frontend", "prefill", "decode"])
def test_compose_runs_the_same(service: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    told = COMPOSE["services"][service]
    file = tmp_path / "fleet.yaml"
    file.write_text(COMPOSE["configs"]["fleet"]["content"])
    config = load_config(file)
    assert told["read_only"] and told["cap_drop"] == ["ALL"]
    assert {mount.partition(":")[0] for mount in told["tmpfs"]} | {"/dev/shm"} == WRITABLE
    grace_s = float(told["stop_grace_period"].removesuffix("s"))
    assert grace_s > config.workers.drain_timeout_s + config.launcher.stop_timeout_s
    if service != "frontend":
        settings = parsed_worker(told["command"], file, monkeypatch)
        assert settings.role.value == service and f":{settings.health_port}/ready" in told["healthcheck"]["test"][-1]


def with_redis() -> list[Path]:
    files = [
        file for file in (ROOT / "deploy").rglob("*.yaml") if re.search(r"(valkey|redis)-server", file.read_text())
    ]
    assert {file.name for file in files} >= {"redis.yaml", "compose.yaml"}
    return files


@pytest.mark.parametrize("file", with_redis(), ids=lambda file: file.name)
def test_redis_refuses_before_its_container_is_killed(file: Path):
    """Without `maxmemory` noeviction has no effect: it is killed with all that waits."""
    text, units = file.read_text(), {"mb": 1 << 20, "g": 1 << 30, "Gi": 1 << 30}
    assert "maxmemory-policy noeviction" in text
    found = [re.search(rf"{name} (\d+)(\w+)", text) for name in ("maxmemory", "(?:limits: {memory|mem_limit):")]
    most, limit = (int(match[1]) * units[match[2]] if match else 0 for match in found)
    assert 0.5 * limit < most < 0.9 * limit, f"maxmemory {most} bytes, limit {limit}"


def test_the_log_of_a_launcher_that_failed_is_there_under_systemd():
    unit = (ROOT / "deploy" / "systemd" / "pd-launcher.service").read_text().splitlines()
    settings = dict(line.split("=", 1) for line in unit if "=" in line and not line.startswith("#"))
    assert settings["Environment"] == f"XDG_RUNTIME_DIR=/run/{settings['RuntimeDirectory']}"
    assert settings["RuntimeDirectoryPreserve"] == "yes", "systemd removes the folder else"
