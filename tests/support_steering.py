"""Orders and ratios as tests give them: at once, whatever the fleet is."""

from orchestrator.store.fields import Launcher, WorkerOrders
from orchestrator.store.planned import Holder, Seen
from orchestrator.store.registry import Registry
from orchestrator.types import DesiredRatio, Role


async def set_desired(registry: Registry, prefill: int, decode: int, by: str = "test") -> None:
    assert await registry.steer(Seen(), desired=DesiredRatio(prefill, decode, by)) is not None


async def order_role(registry: Registry, worker_id: str, role: Role) -> None:
    await _order(registry, worker_id, WorkerOrders(role=role))


async def order_drain(registry: Registry, worker_id: str) -> None:
    await _order(registry, worker_id, WorkerOrders(drain=True))


async def order_restart(registry: Registry, worker_id: str) -> None:
    await _order(registry, worker_id, WorkerOrders(restart=True))


async def _order(registry: Registry, worker_id: str, order: WorkerOrders) -> None:
    assert await registry.steer(Seen(), {worker_id: order}) is not None, f"{worker_id} is not in the fleet"


async def claim_ids(registry: Registry, launcher_id: str, *roles: Role, ttl_s: float = 60) -> list[str]:
    """Ids for workers of these roles, for a launcher that has others already."""
    held = (await registry.launchers()).get(launcher_id, Launcher())
    claimed = await registry.steer(Seen(), holder=Holder(launcher_id, held, ttl_s, roles))
    assert claimed is not None
    return claimed
