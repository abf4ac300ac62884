"""All workers as one launcher plans with them: each counts once, whoever runs it, registered or not."""

from support_redis import worker

from orchestrator.launch.decisions.reconcile import OwnWorker, members
from orchestrator.launch.registry_watch import Snapshot
from orchestrator.store.fields import Launcher
from orchestrator.types import DesiredRatio, Role

OWN = {
    "mine": OwnWorker(Role.PREFILL, "p1"),
    "loads": OwnWorker(Role.DECODE),
    "ends": OwnWorker(Role.DECODE, "p2", True),
}


def test_each_worker_is_planned_with_once() -> None:
    there = [worker("mine", process="p1"), worker("ends", Role.DECODE, process="p2"), worker("others", process="p3")]
    there += [worker("loads", Role.DECODE, process="of a predecessor"), worker("by hand", Role.DECODE)]
    launchers = {"us": Launcher({"mine": Role.PREFILL, "gone": Role.PREFILL})}
    launchers["them"] = Launcher({"others": Role.PREFILL, "theirs": Role.DECODE})
    launchers["by-hand:x"] = Launcher({"hand loads": Role.PREFILL})
    reading = Snapshot({info.id: info for info in there}, {}, launchers, DesiredRatio(1, 1))
    found = members(reading, OWN, "us")
    assert sorted((w.id, w.role.value, w.ready, w.leaving, w.owned, w.managed) for w in found) == [
        ("by hand", "decode", True, False, False, False),
        ("ends", "decode", False, True, True, True),
        ("hand loads", "prefill", False, False, False, False),
        ("loads", "decode", False, False, True, True),
        ("mine", "prefill", True, False, True, True),
        ("others", "prefill", True, False, False, True),
        ("theirs", "decode", False, False, False, True),
    ]
