"""The console scripts as real processes: arguments, one-line errors, signals, and the death of a parent."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import psutil
import pytest
from support_redis import RedisOnPort, fresh_namespace
from support_steering import order_drain, order_restart
from support_wait import DEADLINE_S, until
from support_workers import ROOT, Workers

from orchestrator.config.settings import ConfigError, parse_config
from orchestrator.config.shared import shared
from orchestrator.launch.host.redis_server import EmbeddedRedis
from orchestrator.process.parent import EXIT_AGAIN, own_identity
from orchestrator.store.client import connect
from orchestrator.store.configuration import Phase, Rollout, Version
from orchestrator.store.planned import BY_HAND
from orchestrator.store.registry import Registry
from orchestrator.types import Role, WorkerState
from orchestrator.wire.addresses import Listening, hold_port
from workers.arguments import listening_at, parse
from workers.main import _claim_id, _run, main


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], "prefill-worker: --model: required when no --config names one"),
        (["--model", "m"], "prefill-worker: --redis: required where neither redis.url of --config nor PD_REDIS_URL"),
        (["--redis", "nowhere", "--model", "m"], "--redis: expected redis://, rediss:// or unix://, got 'nowhere'"),
        (["--redis", "embedded", "--model", "m"], "--redis: expected redis://"),
        (["--redis", "redis://h"], "--model: required when no --config names one"),
        (["--redis", "redis://h", "--model", "m", "--engine", "tpu"], "engine: "),
        (["--redis", "redis://h", "--model", "m", "--namespace", "a b"], "namespace: "),
        (["--redis", "redis://h", "--model", "m", "--id", "../x"], "--id: expected text of letters"),
        (["--redis", "redis://h", "--config", "/no/such.yaml"], "/no/such.yaml: cannot be read"),
        (["--redis", "redis://h", "--model", "m", "--engine", "sim", "--enforce-eager"], "--enforce-eager: unknown"),
        (
            ["--redis", "redis://h", "--model", "m", "--engine", "sim", "--label", "r1"],
            "--label: expected NAME=VALUE, got",
        ),
        (["--redis", "redis://h", "--model", "m", "--engine", "sim", "--label", "a=b c"], "--label: expected text of"),
        (["--redis", "redis://h", "--model", "m", "--cores", "x"], "--cores: expected numbers like 0,1, got 'x'"),
        (["--redis", "redis://h", "--model", "m", "--cores", "99999"], "--cores: core 99999 is not available"),
        (
            ["--redis", "redis://h", "--model", "m", "--kv-port", "x"],
            "--kv-port: expected a port from 0 to 65535, got 'x'",
        ),
        (
            ["--redis", "redis://h", "--model", "m", "--health-port", "65536"],
            "--health-port: expected a port from 0 to",
        ),
        (
            ["--redis", "redis://127.0.0.1:1", "--model", "m", "--engine", "sim", "--bind", "192.0.2.7"],
            "--bind (workers.bind), workers.ports: cannot listen at '192.0.2.7'",
        ),
        (
            ["--redis", "redis://h", "--config", "open-mesh.yaml", "--bind", "192.0.2.7"],
            "security.mesh: none lets whoever reaches 192.0.2.7 use the workers",
        ),
    ],
)
def test_bad_arguments_are_one_line_and_exit_code_2(
    arguments: list[str],
    line: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PD_REDIS_URL", raising=False)
    Path("open-mesh.yaml").write_text("model: m\nsecurity: {mesh: none}\n")
    assert main(Role.PREFILL, arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("prefill-worker: ")
    assert line in err


def test_missing_redis_exits_for_restart(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(Role.PREFILL, ["--redis", "redis://127.0.0.1:1", "--model", "m", "--engine", "sim"]) == EXIT_AGAIN
    assert "Redis at redis://127.0.0.1:1 cannot" in capsys.readouterr().err


def test_labels_of_a_worker_are_the_files_and_its_own(tmp_path: Path) -> None:
    (file := tmp_path / "c.yaml").write_text("model: m\nengine: sim\nworkers: {labels: {zone: a, rack: r1}}\n")
    where = ["--redis", "redis://h", "--config", str(file), "--label", "rack=r2", "--label", "row=7"]
    assert parse(Role.DECODE, where).config.workers.labels == {"zone": "a", "rack": "r2", "row": "7"}
    file.write_text("model: m\nengine: sim\nrouting: {pairing: 'strict:rack'}\n")
    assert parse(Role.DECODE, where).config.workers.labels["rack"] == "r2"
    with pytest.raises(ConfigError, match="strict:rack needs the label rack on every worker; set workers.labels.rack"):
        parse(Role.DECODE, where[:4])
    file.write_text("model: m\nengine: sim\nrouting: {pairing: 'strict:host'}\n")
    assert parse(Role.DECODE, where[:4]).config.workers.labels == {}


def test_the_configuration_file_is_overridden_by_options(
    tmp_path: Path, redis_server: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    from orchestrator.config.engine_args import environment

    file = tmp_path / "fleet.yaml"
    file.write_text(
        "model: from-file\nengine: sim\nworkers: {env: {A: '1', B: '1'}, prefill: {env: {B: '2'}, engine_args: {x: 2}},"
        " engine_args: {x: 1, y: 1}}\n"
    )
    parsed = parse(Role.PREFILL, ["--redis", "redis://h", "--config", str(file), "--model", "007", "--id", "me"])
    assert parsed.config.model == "007" and parsed.config.engine == "sim" and parsed.worker_id == "me"
    assert parsed.engine_args == {"x": 2, "y": 1}
    assert environment(parsed.config, Role.PREFILL) == {"A": "1", "B": "2"}
    monkeypatch.setenv("PD_REDIS_URL", "redis://:secret@env")
    assert parse(Role.PREFILL, ["--config", str(file)]).redis_url == "redis://:secret@env"
    file.write_text(f"{file.read_text()}redis: {{url: redis://file}}\n")
    assert parse(Role.PREFILL, ["--config", str(file)]).redis_url == "redis://file", "a launcher's file goes first"
    made_up = parse(Role.DECODE, ["--redis", "redis://h", "--config", str(file)])
    assert made_up.worker_id.startswith("worker-") and made_up.config.model == "from-file"


@pytest.mark.slow
async def test_a_sequence_longer_than_the_memory_is_refused_at_start(workers: Workers) -> None:
    workers.tree["workers"]["engine_args"] = {"num_gpu_blocks_override": 10}
    worker = await workers.spawn(Role.DECODE, wait=False)
    assert await worker.stopped() == 2
    assert worker.log[-1].startswith("decode-worker: workers.engine_args.max_model_len: expected at most 160")


@pytest.mark.slow
async def test_rolled_out_config_overrides_file_and_options_override_both(workers: Workers) -> None:
    """Whoever starts a worker by hand has the file of before: under the new generation it must run what that means."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which a run by nohup ignores, as would what it starts
    try:
        first = await workers.spawn(Role.DECODE)
    finally:
        signal.signal(signal.SIGHUP, before)
    was = await workers.registered(first.id)
    first.kill(signal.SIGHUP)  # its terminal is closed
    assert await first.stopped() == 0
    changed = {"engine_args": {"num_gpu_blocks_override": was.blocks_total + 96, "block_size": 32}}
    fleets = shared(parse_config({**workers.tree, "workers": {"bind": "192.0.2.7", **changed}}))
    rollout = Rollout(Version(2, shared(workers.config)), Version(3, fleets))
    assert await workers.registry.rollout.change(None, rollout)
    worker = await workers.spawn(Role.DECODE, "--model", "mine")
    now = await workers.registered(worker.id)
    assert (now.generation, now.blocks_total, now.identity.block_size) == (3, was.blocks_total + 96, 32)
    assert now.identity.model == "mine" and now.request_address.count("127.0.0.1"), "an option, and what is its host's"
    told = [line for line in worker.log if "configuration 3 was rolled out" in line]
    assert len(told) == 1 and "num_gpu_blocks_override" in told[0] and "block_size" in told[0] and "bind" not in told[0]
    worker.kill(signal.SIGTERM)
    await worker.stopped()
    assert await workers.registry.rollout.change(rollout, rollout.to(Phase.BACK))
    back = await workers.registered((await workers.spawn(Role.DECODE)).id)
    assert (back.generation, back.blocks_total) == (2, was.blocks_total)


@pytest.mark.slow
async def test_an_incompatible_worker_exits_with_2(workers: Workers) -> None:
    await workers.spawn(Role.DECODE)
    worker = await workers.spawn(Role.DECODE, "--model", "another", wait=False)
    assert await worker.stopped() == 2
    assert worker.log[-1].startswith(
        "decode-worker: worker decode-1: model is 'another', but the fleet's is 'sim-model'"
    )


@pytest.mark.slow
async def test_a_worker_may_have_the_model_in_another_folder_than_the_fleet(workers: Workers) -> None:
    """A launcher has looked for it, and tells its workers of the folder; who starts one by hand has the file."""
    await workers.spawn(Role.DECODE, "--model", "/of/the/launcher/small-1")
    by_hand = await workers.spawn(Role.DECODE, "--model", "/elsewhere/small-1")
    other = await workers.spawn(Role.DECODE, "--model", "/elsewhere/small-2", wait=False)
    assert await other.stopped() == 2 and "model is 'small-2', but the fleet's is 'small-1'" in other.log[-1]
    assert (await workers.registered(by_hand.id)).identity.model == "small-1"


@pytest.mark.slow
async def test_taken_kv_port_exits_for_restart(workers: Workers) -> None:
    first = await workers.spawn(Role.PREFILL)
    info = await workers.registered(first.id)
    worker = await workers.spawn(Role.PREFILL, "--kv-port", str(info.kv.port), wait=False)
    assert await worker.stopped() == EXIT_AGAIN
    assert str(info.kv.port) in worker.log[-1] and worker.log[-1].endswith("choose another --kv-port")


@pytest.mark.slow
async def test_duplicate_id_is_refused_unless_restarted(workers: Workers) -> None:
    first = await workers.spawn(Role.DECODE)
    before = await workers.registered(first.id)
    twin = await workers.spawn(Role.DECODE, "--id", first.id, wait=False)
    assert await twin.stopped() == EXIT_AGAIN
    assert f"worker id '{first.id}' is in use by process {first.process.pid} on 127.0.0.1" in twin.log[-1]
    assert (await workers.registry.workers())[first.id].kv == before.kv  # the twin did not take the entry with it
    first.kill()
    await first.stopped()
    again = await workers.spawn(Role.DECODE, "--id", first.id, wait=False)
    while (info := (await workers.registry.workers()).get(first.id)) is None or info.kv == before.kv:
        await asyncio.sleep(0.02)
    again.kill(signal.SIGTERM)
    assert await again.stopped() == 0


@pytest.mark.slow
async def test_an_id_is_claimed_before_the_engine_loads(workers: Workers) -> None:
    """Two workers that load for minutes under one id, and only then see each other, would have loaded in vain."""
    other = "another-host/1/1"
    assert await workers.registry.claim_id(other, Role.DECODE, 60, "decode-x")
    twin = await workers.spawn(Role.DECODE, "--id", "decode-x", wait=False)
    assert await twin.stopped() == EXIT_AGAIN
    assert "worker id 'decode-x' is in use by a worker that is loading" in twin.log[-1]
    assert not any("ready:" in line for line in twin.log), "it was not loaded first"
    place, pid, ticks = own_identity().split("/")
    await workers.registry.leave_launcher(other)
    dead = f"{BY_HAND}{place}/{pid}/{int(ticks) - 1}"
    assert await workers.registry.claim_id(dead, Role.DECODE, 60, "decode-x")
    await workers.spawn(Role.DECODE, "--id", "decode-x", wait=False)
    while "decode-x" not in await workers.registry.workers() or await workers.registry.launchers():
        await asyncio.sleep(0.02)


@pytest.mark.slow
async def test_restarting_worker_drains_and_exits_with_restart_code(workers: Workers) -> None:
    worker = await workers.spawn(Role.DECODE)
    await order_restart(workers.registry, worker.id)
    assert await worker.stopped() == EXIT_AGAIN
    assert worker.id not in await workers.registry.workers()
    other = await workers.spawn(Role.DECODE)
    await order_drain(workers.registry, other.id)
    assert await other.stopped() == 0


@pytest.mark.slow
async def test_processes_hand_kv_over_and_leave_in_order(workers: Workers) -> None:
    prefill, decode = await workers.spawn(Role.PREFILL), await workers.spawn(Role.DECODE)
    frontend = await workers.frontend(prefill, decode, binds_to=decode)
    requests = [frontend.new([i, *range(300)]) for i in range(10)]
    await frontend.enqueue(*requests)
    await frontend.finished(*requests)
    await workers.assert_no_leaks()
    assert frontend.loads[prefill.id].kv.transfers == 10
    for worker in (prefill, decode):
        worker.kill(signal.SIGTERM)
        assert await worker.stopped() == 0
        assert worker.id not in await workers.registry.workers()
        assert any(f" INFO {worker.id} pd.worker: ready: {worker.id.split('-')[0]}" in line for line in worker.log)


@pytest.mark.slow
async def test_sigterm_drains_a_worker_that_no_launcher_runs(workers: Workers) -> None:
    """Within half of `launcher.stop_timeout_s`, which is for workers that a launcher kills after it, it would not."""
    workers.tree["sim"] = {"speed": 1.0}
    workers.tree["launcher"] = {"stop_timeout_s": 0.5}
    workers.tree["workers"]["drain_timeout_s"] = 60.0
    worker = await workers.spawn(Role.DECODE)
    frontend = await workers.frontend(worker)
    request = frontend.submit(worker.id, [1, 2, 3], max_tokens=600)
    await until(lambda: bool(request.tokens), "it decodes")
    worker.kill(signal.SIGTERM)
    assert await worker.stopped() == 0
    await frontend.finished(request)
    assert not request.events, "nothing was given back"


@pytest.mark.slow
async def test_health_port_reports_starting_ready_and_draining(workers: Workers) -> None:
    """As Kubernetes asks it."""
    workers.tree["sim"] = {"speed": 1.0}
    workers.tree["workers"]["drain_timeout_s"] = 60.0
    held, port = hold_port("127.0.0.1")
    worker = await workers.spawn(Role.DECODE, "--health-port", str(port))
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20, trust_env=False) as client:

        async def status(path: str) -> int:
            return (await client.get(path)).status_code

        assert [await status(path) for path in ("/live", "/ready", "/", "/metrics")] == [200, 200, 404, 404]
        worker.kill(signal.SIGSTOP)
        with pytest.raises(httpx.TimeoutException):
            await client.get("/live", timeout=0.5)
        worker.kill(signal.SIGCONT)
        frontend = await workers.frontend(worker)
        request = frontend.submit(worker.id, [1, 2, 3], max_tokens=30_000)
        await until(lambda: bool(request.tokens), "it decodes")
        worker.kill(signal.SIGTERM)
        while await status("/ready") != 503:
            await asyncio.sleep(0.02)
        assert await status("/live") == 200, "one that drains is not to be killed"
    worker.kill(signal.SIGTERM)
    assert await worker.stopped() == 0
    held.close()


@pytest.mark.slow
async def test_taken_health_port_exits_for_restart(workers: Workers) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        worker = await workers.spawn(Role.DECODE, "--health-port", str(port), wait=False)
        assert await worker.stopped() == EXIT_AGAIN
    assert worker.log[-1].startswith(f"decode-worker: --health-port {port}: cannot be listened on")


@pytest.mark.slow
async def test_sigterm_lets_a_short_request_end_and_a_second_does_not_wait(workers: Workers) -> None:
    workers.tree["sim"] = {"speed": 1.0}
    worker, other = await workers.spawn(Role.DECODE), await workers.spawn(Role.DECODE)
    frontend = await workers.frontend(worker, other)
    short, endless = frontend.new([1, 2, 3], max_tokens=150), frontend.new([4, 5, 6], max_tokens=30_000)
    frontend.submit_to(worker.id, short)
    frontend.submit_to(other.id, endless)
    await until(lambda: short.tokens and endless.tokens)
    worker.kill(signal.SIGTERM)
    assert await worker.stopped() == 0
    await frontend.finished(short)
    other.kill(signal.SIGTERM)
    await workers.registered(other.id, state=WorkerState.DRAINING)
    other.kill(signal.SIGTERM)
    assert await other.stopped() == 0
    assert endless.finish is None


DIES_IN_ITS_IMPORTS = """
import os, sys
from orchestrator.types import Role
from workers import main
main._engine = lambda *_: os._exit(9)
main.main(Role.DECODE, sys.argv[1:])
"""


async def test_a_worker_that_dies_in_its_imports_holds_no_id(redis_server: EmbeddedRedis) -> None:
    """They may take two minutes, in which nobody renews a claim. Another host cannot see that its process has ended."""
    redis, namespace = await connect(redis_server.url, 5.0), fresh_namespace()
    registry, arguments = Registry(redis, namespace), ["--redis", redis_server.url, "--namespace", namespace]
    arguments += ["--model", "m", "--engine", "sim", "--id", "d"]
    died = await asyncio.create_subprocess_exec(sys.executable, "-c", DIES_IN_ITS_IMPORTS, *arguments, cwd=ROOT)
    assert await asyncio.wait_for(died.wait(), DEADLINE_S) == 9
    assert not await registry.launchers()
    parsed = parse(Role.DECODE, arguments)
    await _claim_id(registry, parsed)
    (holder,) = await registry.launchers()
    assert await redis.pttl(f"{registry.keys.prefix}launcher:{holder}") <= parsed.config.workers.timeout_s * 1000
    await registry.leave_launcher(holder)
    await redis.aclose()


async def test_the_id_of_a_worker_whose_engine_cannot_be_made_is_free_at_once(
    redis_server: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On another host, or in another container, nobody sees that its process has ended."""
    redis, namespace = await connect(redis_server.url, 5.0), fresh_namespace()
    arguments = ["--redis", redis_server.url, "--namespace", namespace, "--model", "m", "--engine", "sim", "--id", "d"]
    monkeypatch.setattr("workers.main._engine", Mock(side_effect=ConfigError("model: no such folder")))
    with pytest.raises(ConfigError, match="no such folder"):
        await _run(parse(Role.DECODE, arguments))
    assert not await Registry(redis, namespace).launchers()
    await redis.aclose()


@pytest.mark.slow
async def test_worker_stops_without_engine_or_redis(redis_server: EmbeddedRedis, tmp_path: Path) -> None:
    """SIGTERM is obeyed in every state; here: joined, with Redis away."""
    server = RedisOnPort()
    url = await server.start(tmp_path / "redis")
    command = [sys.executable, "-m", "workers.main", "decode", "--redis", url, "--model", "m", "--engine", "sim"]
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stderr=asyncio.subprocess.PIPE)
    assert process.stderr is not None
    try:
        while b"ready:" not in await process.stderr.readline():
            pass
        await server.stop()
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0
    finally:
        await server.stop()
        if process.returncode is None:
            process.kill()


_PARENT = """
import subprocess, sys, time
command = [sys.executable, "-m", "workers.main", "decode", "--engine", "sim", "--model", "m", "--id", "child"]
worker = subprocess.Popen([*command, "--die-with-parent", *sys.argv[1:]])
print(worker.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.slow
async def test_dies_with_its_parent(workers: Workers) -> None:
    """A launcher that is killed leaves no worker behind."""
    arguments = ["--namespace", workers.config.namespace, "--redis", workers.url]
    parent = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", _PARENT, *arguments), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert parent.stdout is not None
    pid = int(await parent.stdout.readline())
    try:
        await workers.registered("child")
    finally:
        parent.kill()
        await parent.wait()
    await until(lambda: not _alive(pid), "the child's end")
    assert "child" not in await workers.registry.workers()  # it left in order


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.slow
def test_both_console_scripts_are_installed() -> None:
    folder = Path(sys.executable).parent
    for name in ("prefill-worker", "decode-worker"):
        done = subprocess.run(
            [folder / name, "--help"], capture_output=True, text=True, timeout=DEADLINE_S, env=os.environ
        )
        assert done.returncode == 0 and f"usage: {name}" in done.stdout and "vLLM" in done.stdout


@pytest.mark.vllm
def test_vllm_arguments_are_parsed_by_vllm() -> None:
    from orchestrator.config.settings import ConfigError
    from workers.arguments import vllm_arguments

    given = ["--max-model-len", "4k", "--enforce-eager", "--kv-cache-memory-bytes=1G", "--no-enable-prefix-caching"]
    assert vllm_arguments(given) == {
        "max_model_len": 4000,
        "enforce_eager": True,
        "kv_cache_memory_bytes": 1 << 30,
        "enable_prefix_caching": False,
    }
    assert vllm_arguments([]) == {}
    with pytest.raises(ConfigError, match="--max-model-len"):
        vllm_arguments(["--max-model-len", "many"])
    with pytest.raises(ConfigError, match="--no-such-thing"):
        vllm_arguments(["--no-such-thing", "1"])


@pytest.mark.slow
async def test_ports_come_from_the_range_and_ipv6_works(workers: Workers) -> None:
    """Two workers at ::1 hand KV over; every port that they and their engines listen at is of `workers.ports`."""
    with socket.socket(socket.AF_INET6) as probe:
        try:
            probe.bind(("::1", 0))
        except OSError:
            pytest.skip("this host has no IPv6")
    ports = range(21000, 21050)
    workers.tree["workers"] = {**workers.tree.get("workers", {}), "ports": "21000-21049", "bind": "::1"}
    prefill, decode = await workers.spawn(Role.PREFILL), await workers.spawn(Role.DECODE)
    for worker in (prefill, decode):
        info = await workers.registered(worker.id)
        assert info.host == info.kv.host == "::1"
        assert info.request_address.startswith("tcp://[::1]:") and info.load_address.startswith("tcp://[::1]:")
        listens = {c.laddr.port for c in psutil.Process(worker.process.pid).net_connections() if c.status == "LISTEN"}
        assert listens == {int(a.rpartition(":")[2]) for a in (info.request_address, info.load_address)} | {
            info.kv.port
        }
        assert listens <= set(ports)
    frontend = await workers.frontend(prefill, decode, binds_to=decode)
    request = frontend.new([1, *range(300)])
    await frontend.enqueue(request)
    await frontend.finished(request)


@pytest.mark.slow
async def test_advertised_address_is_registered_or_refused(
    workers: Workers, capsys: pytest.CaptureFixture[str]
) -> None:
    worker = await workers.spawn(Role.DECODE, "--bind", "0.0.0.0", "--advertise", "localhost")
    info = await workers.registered(worker.id)
    assert info.host == info.kv.host == "127.0.0.1" and info.request_address.startswith("tcp://127.0.0.1:")
    everywhere = await workers.spawn(Role.DECODE, "--bind", "0.0.0.0")
    assert (await workers.registered(everywhere.id)).host == "127.0.0.1", "the address that leads to Redis"


@pytest.mark.parametrize(
    ("more", "line"),
    [
        ([], "workers.bind: 127.0.0.1 is reached from this host alone, but Redis is elsewhere (192.0.2.9); set it to"),
        (["--advertise", "no-such-name.invalid"], "workers.advertise: 'no-such-name.invalid' has no address"),
        (["--bind", "a..b"], "workers.bind: 'a..b' has no address (a label of it is empty or too long)"),
        (["--bind", "0.0.0.0", "--advertise", "0.0.0.0"], "workers.advertise: expected the address of one host"),
    ],
)
def test_an_address_that_cannot_work_is_one_line(
    more: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--redis", "redis://192.0.2.9:6379", "--model", "m", "--engine", "sim"]
    assert main(Role.DECODE, [*arguments, *more]) == 2
    assert line in capsys.readouterr().err


@pytest.mark.parametrize(
    ("redis", "options", "bind", "reached_at"),
    [
        ("redis://127.0.0.1", ["--bind", "both"], "127.0.0.1", "127.0.0.1"),
        ("redis://[::1]", ["--bind", "both"], "::1", "::1"),
        ("redis://127.0.0.1", ["--bind", "0.0.0.0", "--advertise", "both"], "0.0.0.0", "127.0.0.1"),
        ("redis://127.0.0.1", ["--bind", "::", "--advertise", "both"], "::", "::1"),
        ("redis+sentinel://away.invalid,127.0.0.1/s", ["--bind", "auto"], "127.0.0.1", "127.0.0.1"),
        ("redis://both", ["--bind", "0.0.0.0"], "0.0.0.0", "127.0.0.1"),
        ("redis://both", ["--bind", "::"], "::", "::1"),
        ("redis://both", ["--bind", "auto"], "::1", "::1"),
    ],
)
def test_a_worker_is_registered_where_it_listens_also_under_a_name_of_both_families(
    redis: str, options: list[str], bind: str, reached_at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = socket.getaddrinfo

    def look_up(host: str, *more: Any, **named: Any) -> list[Any]:
        return [
            found
            for name in (("::1", "127.0.0.1") if host == "both" else (host,))
            for found in ask(name, *more, **named)
        ]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    parsed = parse(Role.DECODE, ["--redis", redis, "--model", "m", "--engine", "sim", *options])
    assert listening_at(parsed) == Listening(bind, reached_at)


def test_a_name_of_redis_that_cannot_be_looked_up_is_no_wrong_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    """The name service may answer in a moment."""
    arguments = ["--redis", "redis://:secret@away.invalid:6379", "--model", "m", "--engine", "sim", "--bind", "auto"]
    assert main(Role.DECODE, arguments) == EXIT_AGAIN
    err = capsys.readouterr().err
    assert "redis.url: away.invalid has no address now (" in err and "secret" not in err


def test_all_addresses_of_ipv4_are_not_registered_as_one_of_ipv6(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--redis", "redis://[::1]:1", "--model", "m", "--engine", "sim", "--bind", "0.0.0.0"]
    assert main(Role.DECODE, arguments) == 2
    assert "workers.bind: 0.0.0.0 listens at IPv4 only, but others would connect to ::1" in capsys.readouterr().err


@pytest.mark.parametrize("way", ["environment", "workers.env"])
def test_a_worker_that_would_unpickle_messages_does_not_start(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name, file = "VLLM_ALLOW_INSECURE_SERIALIZATION", tmp_path / "fleet.yaml"
    monkeypatch.setenv(name, "1" if way == "environment" else "0")
    file.write_text(
        "model: m\nengine: sim\n" + ("" if way == "environment" else f"workers: {{env: {{{name}: '1'}}}}\n")
    )
    assert main(Role.DECODE, ["--redis", "redis://127.0.0.1:1", "--config", str(file)]) == 2
    err = capsys.readouterr().err
    assert err == f"decode-worker: {name}: messages between hosts are never unpickled; unset it, and in workers.env\n"


@pytest.mark.parametrize("name", ["PD_OPERATOR_KEY", "VLLM_API_KEY"])
def test_key_that_no_client_can_send_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(name, "secret\n")
    assert main(Role.DECODE, ["--redis", "redis://127.0.0.1:1", "--model", "m", "--engine", "sim"]) == 2
    expected = (
        f"{name}: expected text of printable ASCII characters without spaces; see whether it ends with a line break"
    )
    assert capsys.readouterr().err == f"decode-worker: {expected}\n"


GROUP = "model: demo\nengine: sim\nworkers: {engine_args: {data_parallel_size: 2}}"


def test_rank_of_a_group_knows_its_place(tmp_path):
    (file := tmp_path / "fleet.yaml").write_text(GROUP)
    where = ["--redis", "redis://h", "--config", str(file), "--ranks", "d,d.1"]
    second = parse(Role.DECODE, [*where, "--id", "d.1"])
    assert second.ranks == ("d", "d.1") and second.id_claimed, "its unit's id is the first one's"
    assert not parse(Role.DECODE, [*where, "--id", "d"]).id_claimed


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ("--id d", r"--ranks: expected 2 different ids, as many as workers.engine_args.data_parallel_size, got none"),
        ("--id d --ranks d,d", "--ranks: expected 2 different ids"),
        ("--id e --ranks d,d.1", r"--id: expected one of --ranks \(d,d.1\), got e"),
    ],
)
def test_group_that_cannot_meet_is_refused(tmp_path, options, line):
    (file := tmp_path / "fleet.yaml").write_text(GROUP)
    with pytest.raises(ConfigError, match=line):
        parse(Role.DECODE, ["--redis", "redis://h", "--config", str(file), *options.split()])
