"""What a launcher reads from one snapshot of the registry."""

import msgspec
import pytest
from support_redis import worker

from orchestrator.launch.registry_watch import Snapshot
from orchestrator.store.registry import Frontend
from orchestrator.types import WorkerState


@pytest.mark.parametrize(
    ("reaches", "connected"),
    [((2, 2), True), ((3, 2), True), ((2, 1), False), ((0, 2), False)],
)
def test_a_fleet_is_connected_when_each_serving_frontend_reaches_all_ready_workers(reaches, connected):
    ready = [msgspec.structs.replace(worker(name), state=WorkerState.READY) for name in ("a", "b")]
    loading = msgspec.structs.replace(worker("c"), state=WorkerState.STARTING)
    serving = {f"f{n}": Frontend(f"f{n}", "http://x", "1", reaches=r) for n, r in enumerate(reaches)}
    leaving = {"old": Frontend("old", "", "2", reaches=0)}
    snapshot = Snapshot(workers={info.id: info for info in [*ready, loading]}, frontends=serving | leaving)
    assert snapshot.connected() is connected
