"""Cores and GPUs are shared out evenly, and a machine that is too small says so."""

import contextlib
import math
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.config.engine_args import ranks
from orchestrator.config.settings import ConfigError, parse_config
from orchestrator.frontend.untrusted.connections import listen
from orchestrator.launch.commands import Setup, frontend_spec, resolve, to_import, worker_spec
from orchestrator.launch.host import machine
from orchestrator.launch.host.machine import (
    CoreShares,
    GpuShares,
    MachineShares,
    Share,
    check_bind,
    find_gpus,
    hold_port,
)
from orchestrator.launch.host.run_folder import RunFolder
from orchestrator.launch.launcher import _with_operator_key
from orchestrator.launch.machines import LocalMachine
from orchestrator.types import Role


def test_two_workers_on_two_cores_have_one_each():
    shares = CoreShares([0, 1], ranks=2, frontends=1)
    assert [shares.take("a"), shares.take("b")] == [[0], [1]]
    assert shares.take("a") == [0], "a restarted worker gets its own back"


def test_more_workers_than_cores_share_as_evenly_as_can_be():
    shares = CoreShares([0, 1], ranks=2, frontends=1)
    taken = [shares.take(name) for name in "abcd"]
    assert sorted(taken) == [[0], [0], [1], [1]]
    shares.give_back("b")
    assert shares.take("e") == [1]


def test_large_machines_keep_cores_for_frontends():
    shares = CoreShares(list(range(16)), ranks=2, frontends=2)
    assert shares.take("a") == list(range(7)) and shares.take("b") == list(range(7, 14))


def test_a_worker_with_several_ranks_has_a_core_for_each():
    assert CoreShares([0, 1, 2], ranks=3, frontends=0).take("a", ranks=2) == [0, 1]
    assert CoreShares([0, 1, 2], ranks=1, frontends=0).take("a", ranks=2) == [0, 1], "more than was configured"
    assert CoreShares([0], ranks=1, frontends=0).take("a", ranks=2) == [], "too few: not pinned"


def test_a_worker_with_fewer_ranks_than_another_has_as_many_cores_for_each():
    large = CoreShares(list(range(16)), ranks=3, frontends=2)
    assert [large.take("one"), large.take("two", ranks=2)] == [[0, 1, 2, 3], list(range(4, 12))]
    small = CoreShares([0, 1], ranks=3, frontends=1)
    assert [small.take("two", ranks=2), small.take("one")] == [[], []], "more ranks than cores: nobody is pinned"


def test_more_ranks_than_cores_get_one_thread_each(monkeypatch):
    monkeypatch.setattr("orchestrator.launch.host.machine.find_gpus", list)
    monkeypatch.setattr("orchestrator.launch.host.machine.find_cores", lambda: [0, 1])
    config = parse_config({"model": "m", "workers": {"decode": {"engine_args": {"tensor_parallel_size": 2}}}})
    shares = MachineShares(config)
    assert shares.take("p", Role.PREFILL) == shares.take("d", Role.DECODE) == Share(env={"OMP_NUM_THREADS": "1"})
    one_rank_each = MachineShares(parse_config({"model": "m"}))
    assert one_rank_each.take("p", Role.PREFILL) == Share(["--cores", "0"])


def test_gpus_are_neighbours_and_exclusive():
    shares = GpuShares(["0", "1", "2", "3"])
    assert shares.take("a", 2) == ["0", "1"] and shares.take("b", 2) == ["2", "3"]
    with pytest.raises(ConfigError, match=r"c: needs 1 GPU\(s\) with 100% .* has 0 left of 4; lower replicas"):
        shares.take("c", 1)
    shares.give_back("a")
    assert shares.take("c", 1) == ["0"]


def test_gpus_are_shared_when_utilization_allows():
    shares = GpuShares(["0"])
    assert shares.take("a", 1, 0.45) == shares.take("b", 1, 0.45) == ["0"]
    with pytest.raises(ConfigError, match="gpu_memory_utilization"):
        shares.take("c", 1, 0.45)


def test_gpus_are_found_by_device_file_or_taken_from_the_environment(tmp_path, monkeypatch):
    for name in ("nvidia0", "nvidia10", "nvidia2", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert find_gpus(tmp_path) == ["0", "2", "10"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, GPU-abc")
    assert find_gpus(tmp_path) == ["3", "GPU-abc"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert find_gpus(tmp_path) == []


def config_of(**sections):
    return parse_config({"model": "m", **sections})


def test_ranks_are_the_product_of_the_parallel_sizes():
    config = config_of(
        workers={"engine_args": {"tensor_parallel_size": 2}, "decode": {"engine_args": {"pipeline_parallel_size": 2}}}
    )
    assert (ranks(config, Role.PREFILL), ranks(config, Role.DECODE)) == (2, 4)
    with pytest.raises(ConfigError, match="tensor_parallel_size: expected an integer >= 1, got 'two'"):
        ranks(config_of(workers={"engine_args": {"tensor_parallel_size": "two"}}), Role.DECODE)


def test_a_fleet_that_needs_more_memory_than_there_is_is_refused(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    config = config_of(workers={"decode": {"replicas": 20}, "engine_args": {"kv_cache_memory_bytes": 1 << 40}})
    with pytest.raises(ConfigError, match="20 decode replicas .* GiB; lower replicas"):
        MachineShares(config).check_room()


def test_models_divide_one_machine(monkeypatch):
    """Each as if it were alone would give a GPU or a core twice."""
    monkeypatch.setattr("orchestrator.launch.host.machine.has_cuda_vllm", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    two = {"engine_args": {"tensor_parallel_size": 2}}
    small, large = config_of(served_model_name="small"), config_of(served_model_name="large", workers=two)
    with pytest.raises(ConfigError, match=r"large: workers\.prefill 0: needs 2 GPU.* has 1 left of 3"):
        MachineShares(small, large).check_room()
    shares = MachineShares(small, large)
    machines = [LocalMachine(config, shares) for config in (small, large)]
    machines[1].take("large-worker-0", Role.DECODE)
    machines[0].take("small-worker-0", Role.DECODE)
    with pytest.raises(ConfigError, match="has 0 left of 3"):
        machines[0].take("small-worker-1", Role.PREFILL)
    assert [machine.room for machine in machines] == [3, 1]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr("orchestrator.launch.host.machine.find_cores", lambda: list(range(8)))
    on_cores = MachineShares(config_of(), config_of(engine="sim"), config_of())
    given = [on_cores.take(f"w{i}", Role.DECODE, config_of()).arguments for i in range(4)]
    assert given == [["--cores", str(core)] for core in range(4)], "one stays for the frontend"
    assert on_cores.take("s", Role.DECODE, config_of(engine="sim")) == Share()


def test_models_that_may_be_idle_take_turns_on_one_machine(monkeypatch):
    monkeypatch.setattr("orchestrator.launch.host.machine.has_cuda_vllm", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    alone = {"prefill": {"replicas": 0}}
    stays = config_of(workers=alone)
    rests = [config_of(served_model_name=name, idle_after_s=60) for name in "ab"]
    MachineShares(stays, *rests).check_room()
    with pytest.raises(ConfigError, match="a: workers.prefill 0: needs 1 GPU"):
        MachineShares(stays, rests[0], config_of(served_model_name="b")).check_room()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr("orchestrator.launch.host.machine.find_cores", lambda: [0, 1])
    on_cores = MachineShares(*(config_of(idle_after_s=60, workers=alone) for _ in range(2)))
    assert on_cores.take("a", Role.DECODE).arguments == ["--cores", "0,1"]
    on_cores.give_back("a")
    assert on_cores.take("b", Role.DECODE).arguments == ["--cores", "0,1"]


def test_a_model_that_is_added_finds_the_devices_that_simulated_ones_did_not_need(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr("orchestrator.launch.host.machine.find_cores", lambda: list(range(8)))
    shares, added = MachineShares(config_of(engine="sim")), config_of()
    shares.add(added)
    assert shares.take("x", Role.DECODE, added).arguments == ["--cores", "0,1,2"]
    huge = config_of(workers={"engine_args": {"kv_cache_memory_bytes": 1 << 50}})
    with pytest.raises(ConfigError, match="kv_cache_memory_bytes need"):
        shares.add(huge)
    shares.remove(added)
    shares.remove(added)


def test_simulated_workers_are_not_pinned():
    assert MachineShares(config_of(engine="sim")).take("a", Role.PREFILL) == Share()


def test_command_lines_have_resolved_values(tmp_path):
    config = resolve(config_of(model="demo", workers={"env": {"A": "1"}}), "/models/demo", "redis://h:1", 1234)
    assert (config.model, config.served_model_name, config.frontend.port) == ("/models/demo", "demo", 1234)
    spec = worker_spec(
        Setup(3, config, tmp_path / "c.yaml"), Role.DECODE, "prefill-0", Share(["--cores", "1"], {"B": "2"})
    )
    line = " ".join(spec.command)
    assert " -m workers.main decode --id prefill-0 --namespace default " in line
    assert "--generation 3 --die-with-parent --id-claimed --cores 1" in line
    assert spec.env["A"] == "1" and spec.env["B"] == "2"
    assert "redis://" not in " ".join(spec.command), "everybody on this machine reads a password there"
    deep = worker_spec(Setup(0, config, Path("/" + "x" * 100) / "c.yaml"), Role.DECODE, "d", Share())
    assert "VLLM_RPC_BASE_PATH" not in deep.env, "a socket's path must fit"
    assert frontend_spec(Setup(0, config, tmp_path / "c.yaml"), "frontend-2", 2).name == "frontend-2"


def test_simulated_workers_are_forked_by_what_has_not_imported_vllm(tmp_path):
    config = resolve(config_of(engine="sim"), "/models/demo", "redis://h:1", 1234)
    spec = worker_spec(Setup(0, config, tmp_path / "c.yaml"), Role.DECODE, "decode-0", Share())
    assert spec.forkable is not None and spec.forkable.command == spec.command
    asked_for = spec.forkable.imports[: spec.forkable.needs]
    assert asked_for and spec.forkable.imports in {program.imports for program, _ in to_import(config)}, "in good time"
    code = f"import sys, {', '.join(spec.forkable.imports)}; print({{'vllm', 'torch'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "set()\n", done.stderr


def test_cluster_frontends_get_operator_key_of_launcher(tmp_path):
    """They listen at the addresses of their nodes, also where `frontend.host` says nothing."""
    ray = {"launcher": {"kind": "ray"}, "redis": {"url": "redis://h:1"}}
    made = resolve(config_of(**ray), "m", "redis://h:1", 8000).security.operator_key
    assert made and resolve(config_of(), "m", "redis://h:1", 8000).security.operator_key is None


def test_surviving_frontends_keep_operator_key(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    ray = config_of(launcher={"kind": "ray"}, redis={"url": "redis://h:1"})
    killed, next_one = RunFolder("default"), RunFolder("default")
    killed.claim()
    before = resolve(ray, "m", "redis://h:1", 8000)
    killed.write_config(before)
    assert _with_operator_key({"": ray}, next_one) == {"": ray}, "it runs: the next one is refused"
    assert killed._lock is not None
    killed._lock.close()  # as the kernel does
    assert _with_operator_key({"": ray}, next_one)[""].security.operator_key == before.security.operator_key
    assert _with_operator_key({"": config_of()}, next_one) == {"": config_of()}, "here they die with it"


def test_configured_python_runs_its_own_code(tmp_path):
    config = config_of(python="/opt/new/bin/python", workers={"env": {"PYTHONPATH": "/opt/more"}})
    setup = Setup(1, resolve(config, "/models/demo", "redis://h:1", 1234), tmp_path / "c.yaml")
    worker, frontend = worker_spec(setup, Role.DECODE, "decode-0", Share()), frontend_spec(setup, "frontend-0", 0)
    for spec in (worker, frontend):
        assert spec.command[:3] == ["/opt/new/bin/python", "-P", "-m"], "not what lies in our working directory"
    assert frontend.env["PYTHONPATH"] == "" and worker.env["PYTHONPATH"] == "/opt/more"
    ours = Setup(0, resolve(config_of(), "/models/demo", "redis://h:1", 1234), tmp_path / "c.yaml")
    same = worker_spec(ours, Role.DECODE, "decode-0", Share())
    assert same.command[:2] == [sys.executable, "-m"] and "PYTHONPATH" not in same.env


def test_port_is_held_for_own_frontends():
    """From the moment that it is held, also while nobody listens yet: models load for minutes."""
    held, port = hold_port("127.0.0.1", 0)
    with held:
        for host in ("127.0.0.1", "0.0.0.0"):
            with pytest.raises(ConfigError, match=rf"frontend.port: port {port} on {host} is in use"):
                hold_port(host, port)
        for _ in range(2):  # they come, go, and come again
            frontends = [listen("127.0.0.1", port) for _ in range(2)]
            for frontend in frontends:
                frontend.listen()
            with pytest.raises(ConfigError, match=rf"frontend.port: port {port} on 127.0.0.1 is in use"):
                hold_port("127.0.0.1", port)
            client = socket.create_connection(("127.0.0.1", port))
            for each in (*frontends, client):
                each.close()
    hold_port("127.0.0.1", port)[0].close()


def test_a_wrong_host_is_reported_as_the_host_and_a_port_in_use_as_the_port():
    with pytest.raises(ConfigError, match=r"^frontend\.host: 203\.0\.113\.7:0 .*name an address of this host"):
        hold_port("203.0.113.7", 0)
    with pytest.raises(ConfigError, match=r"^frontend\.host: 203\.0\.113\.7:0 "):
        listen("203.0.113.7", 0)
    held, port = hold_port("127.0.0.1", 0)
    held.listen()
    with held, pytest.raises(ConfigError, match=rf"^frontend\.port: port {port} "):
        hold_port("127.0.0.1", port)


def test_more_workers_than_memory_or_ports_are_refused():
    shares = MachineShares(parse_config({"model": "demo", "engine": "sim", "workers": {"ports": "20000-20007"}}))
    shares.take("prefill-0", Role.PREFILL)
    shares.take("decode-0", Role.DECODE)
    with pytest.raises(ConfigError, match=r"^workers\.ports: 20000-20007 are 8 ports, enough for 2 workers of 3 each"):
        shares.take("decode-1", Role.DECODE)
    shares.give_back("prefill-0")
    shares.take("decode-1", Role.DECODE)  # what was refused holds nothing


def test_a_group_needs_a_port_more():
    workers = {"ports": "20000-20009", "engine_args": {"data_parallel_size": 2}}
    shares = MachineShares(parse_config({"model": "demo", "engine": "sim", "workers": workers}))
    for rank in ("decode-0", "decode-0.1"):
        shares.take(rank, Role.DECODE)
    with pytest.raises(ConfigError, match=r"20000-20009 are 10 ports, enough for 2 workers of 3 each"):
        shares.take("decode-1", Role.DECODE)


def test_a_machine_says_how_many_workers_it_holds(monkeypatch):
    monkeypatch.setattr(os, "sysconf", lambda name: 1 << 15)  # a GiB in pages

    def room(gpus: str = "", **config: object) -> int:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
        monkeypatch.setattr(machine, "has_cuda_vllm", lambda: True)
        parsed = parse_config({"model": "demo"} | config)
        return MachineShares(parsed).room_for(parsed)

    assert room(engine="sim") == 36
    assert room(engine="sim", workers={"ports": "20000-20007"}) == 2
    monkeypatch.setattr(os, "sysconf", lambda name: 1 << 22)
    assert room("0,1,2,3") == 4
    assert room("0,1,2,3", workers={"engine_args": {"gpu_memory_utilization": 0.45}}) == 8
    of_two = {"engine_args": {"tensor_parallel_size": 2}}
    assert room("0,1,2,3,4", workers={"prefill": of_two, "decode": of_two}) == 2
    assert room("0,1,2,3", workers={"prefill": of_two}) == 4, "as many as fit with the role that takes less"
    for count in (4, 5):  # what `up` allows
        config = parse_config({"model": "demo", "workers": {"decode": {"replicas": count - 1}}})
        shares = MachineShares(config)
        with (
            contextlib.nullcontext()
            if count <= shares.room_for(config)
            else pytest.raises(ConfigError, match="needs 1 GPU")
        ):
            shares.check_room()


def test_a_machine_goes_by_the_size_of_workers_that_was_rolled_out(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "sysconf", lambda name: 1 << 22)
    monkeypatch.setattr(machine, "has_cuda_vllm", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    two, one = (config_of(workers={"engine_args": {"tensor_parallel_size": size}}) for size in (2, 1))
    here = LocalMachine(two)
    here.take("worker-0", Role.DECODE)
    assert here.room == 2 and len(here.fitting([Role.DECODE] * 4)) == 1
    here.use(one)
    here.worker("worker-0", Role.DECODE, Setup(1, one, tmp_path / "c.yaml"), lambda *line: None)
    assert here.room == 4 and len(here.fitting([Role.DECODE] * 4)) == 3


def test_ten_thousand_workers_on_a_small_machine_are_refused(monkeypatch):
    monkeypatch.setattr(os, "sysconf", lambda name: 1 << 15)  # a GiB in pages
    pools = {"prefill": {"replicas": 10_000}, "decode": {"replicas": 10_000}}
    with pytest.raises(ConfigError, match=r"^workers: this machine's memory holds at most 36 processes of 28 MiB"):
        MachineShares(parse_config({"model": "demo", "engine": "sim", "workers": pools})).check_room()


def test_host_tiers_that_the_machine_has_no_memory_for_are_refused(monkeypatch):
    monkeypatch.setattr(os, "sysconf", lambda name: 1 << 18)  # 64 GiB in pages

    def fleet(each: int, **more: object) -> MachineShares:
        workers = {"decode": {"replicas": 3}} | more
        return MachineShares(parse_config({"model": "demo", "kv": {"host_tier_bytes": each}, "workers": workers}))

    fleet(15 << 30).check_room()
    for too_much in (fleet(16 << 30), fleet(8 << 30, engine_args={"tensor_parallel_size": 2})):
        with pytest.raises(ConfigError, match="at most 3 processes of .*; lower kv.host_tier_bytes, or replicas"):
            too_much.check_room()


def test_workers_bind_must_be_an_address_of_this_host():
    for host in ("auto", "127.0.0.1", "0.0.0.0"):
        check_bind(host)
    with pytest.raises(ConfigError, match="workers.bind: cannot listen at '203.0.113.7'"):
        check_bind("203.0.113.7")


@pytest.mark.parametrize(("limit", "count"), [(math.inf, 8), (64.0, 8), (2.5, 2), (0.5, 1)])
def test_a_container_computes_on_neighbouring_cores_within_its_limit(monkeypatch, limit: float, count: int):
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda pid: set(range(8, 16)))
    monkeypatch.setattr(machine, "cpu_limit", lambda: limit)
    beginnings = set()
    for name in (f"container-{number}" for number in range(50)):
        monkeypatch.setattr(machine.socket, "gethostname", lambda name=name: name)
        cores = machine.find_cores()
        assert cores == list(range(cores[0], cores[0] + count)) and 8 <= cores[0] and cores[-1] < 16
        beginnings.add(cores[0])
    assert len(beginnings) == 8 - count + 1, "containers beside each other choose others"
