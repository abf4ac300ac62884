"""A Ray cluster of several nodes on this machine: each node has its own loopback address and Ray's real processes."""

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from support_redis import Server

# As an operator may set them who wants a dead node noticed within two seconds; Ray reads them from the environment.
FAST_HEALTH_CHECKS = {
    "RAY_health_check_initial_delay_ms": "0",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "500",
    "RAY_health_check_failure_threshold": "4",
}
_STORE_BYTES = 80 << 20
_TOKEN = secrets.token_hex(32)  # of all clusters: a process reads its token once, whatever its environment says later


class FakeCluster:
    """A head without cores at 127.0.0.1, and nodes that are added at 127.0.0.2 and on."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        head = {"num_cpus": 0, "node_ip_address": "127.0.0.1", "include_dashboard": False}
        self._cluster = Cluster(initialize_head=True, head_node_args={**head, "object_store_memory": _STORE_BYTES})
        self._nodes: dict[str, Any] = {}
        self.address: str = self._cluster.address

    def add(self, gpus: int) -> str:
        """Returns the address of the new node."""
        address = f"127.0.0.{2 + len(self._nodes)}"
        self._nodes[address] = self._cluster.add_node(
            num_cpus=8, num_gpus=gpus, node_ip_address=address, object_store_memory=_STORE_BYTES
        )
        return address

    def kill(self, address: str) -> None:
        """As a machine that loses its power: every process of the node, at once."""
        node = self._nodes[address]
        raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
        for process in [raylet, *raylet.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def places(self, namespace: str) -> list[str]:
        """The units of a fleet that have a placement group."""
        prefix = f"pd-{namespace}/"
        tables = self._cluster.global_state.placement_group_table().values()
        there = [table["name"] for table in tables if table["state"] != "REMOVED"]
        return sorted(name.removeprefix(prefix) for name in there if name.startswith(prefix))

    def kill_head(self) -> None:
        """The process that knows the cluster: nodes and what runs there."""
        self._cluster.head_node.kill_gcs_server()

    def start_head_again(self) -> None:
        self._cluster.head_node.start_gcs_server()

    def shutdown(self) -> None:
        self._cluster.shutdown()


@contextlib.contextmanager
def fake_cluster(redis_url: str, nodes: int = 0, gpus: int = 0) -> Iterator[FakeCluster]:
    """With `nodes` of `gpus` each. That Redis keeps what the head knows, so that it can come back."""
    settings = {
        **FAST_HEALTH_CHECKS,
        "RAY_REDIS_ADDRESS": redis_url.removeprefix("redis://"),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": _TOKEN,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # or Ray takes loopback addresses for one machine
        "PYTHONPATH": str(Path(__file__).parents[1]),
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setenv(name, value)
        cluster = FakeCluster()
        try:
            for _ in range(nodes):
                cluster.add(gpus)
            yield cluster
        finally:
            cluster.shutdown()


def on_ray(server: Server, cluster: FakeCluster) -> tuple[str, ...]:
    """Settings of a fleet on this cluster, of whose ranks each takes a GPU."""
    ray = ("launcher.kind=ray", f"launcher.address={cluster.address}", "launcher.gpus_per_rank=1")
    return (f"redis.url={server.url}", "redis.timeout_s=5", *ray)


def processes_of(namespace: str) -> list[int]:
    """The fleet's workers and frontends, wherever they run on this machine."""
    found = []
    for process in psutil.process_iter(["pid", "cmdline"]):
        command = " ".join(process.info["cmdline"] or ())
        ours = "workers.main" in command or "orchestrator.frontend.server" in command
        if ours and namespace in command and process.info["pid"] != os.getpid():
            found.append(process.info["pid"])
    return found
