"""The rows: every fault, and what clients may see of it."""

from __future__ import annotations

from benchmarks.chaos import (
    frontend_faults,
    host_faults,
    link_faults,
    operator_faults,
    pair_faults,
    redis_faults,
    worker_faults,
)
from benchmarks.chaos.world import Fault
from orchestrator.types import Role
from workers.load.reports import ENGINE_STUCK_S

PREFILL_GAP_S, QUEUE_GAP_S, DECODE_GAP_S, LINK_GAP_S, GONE_S = 2.0, 3.0, 3.0, 6.0, 2.0
# An engine may be computing a long step, so its worker is taken for stuck later than one that is silent itself.
STUCK_GAP_S = ENGINE_STUCK_S + DECODE_GAP_S
FRONTEND_STOPPED_GAP_S = frontend_faults.STOPPED_S + QUEUE_GAP_S

_PREFILL = [
    Fault(f"prefill_{how}_{phase}", make(Role.PREFILL, phase), PREFILL_GAP_S)
    for how, make in (("killed", worker_faults.killed), ("stopped", worker_faults.stopped))
    for phase in ("idle", "claimed", "prefilling", "pushing")
]
_QUEUE = [
    Fault("all_prefill_killed", worker_faults.all_prefill_killed, QUEUE_GAP_S),
    Fault("all_prefill_stopped", worker_faults.all_prefill_stopped, QUEUE_GAP_S),
    Fault("queue_lost", redis_faults.queue_lost, QUEUE_GAP_S),
    Fault("redis_killed", redis_faults.killed, QUEUE_GAP_S),
    Fault("redis_restarted_empty", redis_faults.restarted_empty, QUEUE_GAP_S),
    Fault("redis_emptied", redis_faults.emptied, QUEUE_GAP_S),
    Fault("redis_stopped_30_s", redis_faults.stopped, QUEUE_GAP_S),
    Fault("redis_read_only", redis_faults.read_only, QUEUE_GAP_S),
    Fault("redis_without_replicas", redis_faults.writes_refused_by("min-replicas-to-write"), QUEUE_GAP_S),
    Fault("redis_out_of_memory", redis_faults.writes_refused_by("maxmemory"), QUEUE_GAP_S),
]
_DECODE = [
    Fault(f"decode_{how}_{phase}", make(Role.DECODE, phase), DECODE_GAP_S)
    for how, make in (("killed", worker_faults.killed), ("stopped", worker_faults.stopped))
    for phase in ("awaiting_kv", "decoding")
]
_ENGINES = [
    Fault("tp_rank_killed", worker_faults.rank_killed, DECODE_GAP_S, fleet="ranks", engines=("real",)),
    Fault("decode_engine_stopped", worker_faults.engine_stopped, STUCK_GAP_S, engines=("real",)),
]
_LINKS = [
    Fault(
        f"link_{one}_{other}_cut{way}",
        link_faults.cut(one, other, forth, back),
        LINK_GAP_S,
        fleet="network",
        engines=("sim",),
    )
    for one, other in (
        ("prefill", "decode"),
        ("frontend", "prefill"),
        ("frontend", "decode"),
        ("redis", "frontend"),
        ("redis", "prefill"),
        ("redis", "decode"),
    )
    for way, forth, back in (("", True, True), ("_forth", True, False), ("_back", False, True))
]
_LINKS += [
    Fault(
        f"link_frontend_{kind}_requests_cut",
        link_faults.requests_cut(kind),
        LINK_GAP_S,
        fleet="network",
        engines=("sim",),
    )
    for kind in ("prefill", "decode")
]
_MACHINES = [
    Fault(f"{name}_of_{kind}_{how}", make(kind), LINK_GAP_S, fleet="network", engines=("sim",))
    for name, how, make in (("links", "slow", link_faults.slow), ("machine", "cut_off", link_faults.cut_off))
    for kind in ("prefill", "decode")
]
_FRONTENDS = [
    Fault("frontend_killed", frontend_faults.killed, QUEUE_GAP_S, fleet="frontends", gone_s=GONE_S),
    Fault("frontend_stopped", frontend_faults.stopped, FRONTEND_STOPPED_GAP_S, fleet="frontends"),
    Fault("launcher_killed", frontend_faults.launcher_killed, None, gone_s=GONE_S),
]
_POISON = [Fault("poison", worker_faults.poisoned, DECODE_GAP_S, streams=10, once=True, engines=("sim",))]
_HOST = [
    Fault("disk_full", host_faults.disk_full, QUEUE_GAP_S, fleet="disk"),
    Fault("terminal_stopped", host_faults.terminal_stopped, QUEUE_GAP_S, fleet="terminal"),
    Fault("run_folder_removed", host_faults.folder_removed, QUEUE_GAP_S),
    Fault("log_pipe_unread", host_faults.pipe_unread, QUEUE_GAP_S),
    Fault("cpu_starved", host_faults.starved, None),
]
_OPERATOR = [
    Fault(f"operator_{name}", make, DECODE_GAP_S, engines=("sim",))
    for name, make in (
        ("scales", operator_faults.scaled),
        ("scales_one_killed", operator_faults.one_dies_during(operator_faults.scaled)),
        ("swaps_roles", operator_faults.roles_swapped),
        ("restarts", operator_faults.restarted),
        ("restarts_one_killed", operator_faults.one_dies_during(operator_faults.restarted)),
    )
]
# Either fault may delay the same answer, so their bounds add up.
_PAIRS = [
    Fault("pair_prefill_decode_killed", pair_faults.prefill_and_decode, PREFILL_GAP_S + DECODE_GAP_S),
    Fault("pair_decode_redis_killed", pair_faults.decode_and_redis, DECODE_GAP_S + QUEUE_GAP_S),
    Fault(
        "pair_frontend_prefill_killed",
        pair_faults.frontend_and_prefill,
        QUEUE_GAP_S + PREFILL_GAP_S,
        fleet="frontends",
        gone_s=GONE_S,
    ),
    Fault("pair_launcher_decode_killed", pair_faults.launcher_and_decode, None, gone_s=GONE_S),
]

FAULTS: dict[str, Fault] = {
    fault.name: fault
    for fault in [
        *_PREFILL,
        *_QUEUE,
        *_DECODE,
        *_ENGINES,
        *_LINKS,
        *_MACHINES,
        *_FRONTENDS,
        *_POISON,
        *_HOST,
        *_OPERATOR,
        *_PAIRS,
    ]
}
# Rows that run only if they are named: one needs an otherwise idle machine for minutes, the others real engines.
BY_NAME = ("cpu_starved", "tp_rank_killed", "decode_engine_stopped")
