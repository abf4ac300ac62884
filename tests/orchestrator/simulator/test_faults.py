"""Random fleets, loads and failures: every request ends once, and nothing is left behind."""

import random

import msgspec
import pytest

from orchestrator.config.settings import ConfigError
from orchestrator.simulator import faults
from orchestrator.simulator.engine.profile import Profile
from orchestrator.simulator.loads import synthetic
from orchestrator.simulator.settings import SHIPPED, Settings, changed, stack, stack_names
from orchestrator.simulator.simulation import Simulation
from orchestrator.simulator.trace import Arrival, Load

PROFILE = Profile(
    name="small", origin="made up", step_s=0.01, prefill_s_per_token=0.0001, decode_s_per_seq=0.0005,
    kv_s_per_token=1e-7, blocks=400, max_num_batched_tokens=512, max_num_seqs=16, max_model_len=30_000,
    kv_bytes_per_token=100_000, link_bytes_per_s=1e9,
)  # fmt: skip


def random_run(seed: int) -> Simulation:
    rng = random.Random(seed)
    profile = msgspec.structs.replace(PROFILE, blocks=rng.choice([200, 400, 2000]))
    now, arrivals = 0.0, []
    for _ in range(100):
        now += rng.expovariate(rng.choice([1, 3]))
        prompt, family = rng.randrange(1, 2500), rng.randrange(5)
        keys = tuple(family * 100 + unit for unit in range(prompt // 512)) if rng.random() < 0.7 else ()
        arrivals.append(Arrival(now, prompt, rng.randrange(1, 400), keys, rng.choice([0, 0, -1, 2])))
    settings = Settings(
        prefill=rng.randrange(1, 4),
        decode=rng.randrange(1, 4),
        profile=profile,
        stack=stack(rng.choice(stack_names()), changed(SHIPPED, {"kv": {"transfer": rng.choice(["whole", "chunk"])}})),
        seed=seed,
    )
    sim = Simulation(settings, Load("random", arrivals, 512))
    for _ in range(rng.randrange(5)):
        faults.kill(sim, rng.choice(list(sim.workers)), rng.random() * now, rng.choice([1.0, 3.0, 10.0]))
    return sim


@pytest.mark.parametrize("seed", range(30))
def test_every_request_ends_and_every_block_is_free_again(seed):
    sim = random_run(seed)
    sim.run()
    assert sim.left == 0
    assert {job.outcome for job in sim.jobs} <= {"ok", "too_long", "rejected"}
    sim.finish_events()
    assert sim.router.queue == [] and sim.router.queue_tokens == 0 and sim.router.claimed == 0
    for worker in sim.workers.values():
        assert worker.idle and worker.kv.used == 0 and worker.pending_tokens == 0, worker.name


def test_a_request_that_is_placed_again_brings_its_tpot_objective_once():
    load = synthetic("bursty", 40)
    made = [msgspec.structs.replace(it, at=0.01 * n, tpot_slo_s=0.015) for n, it in enumerate(load.arrivals[:40])]
    settings = Settings(prefill=1, decode=2, profile=PROFILE, stack=stack("ours:fixed"))
    sim = Simulation(settings, Load("lost", made, load.unit_tokens))
    for at in (0.5, 1.0, 1.5):
        faults.kill(sim, "d0", at, 0.2)
    sim.run()
    assert sim.router.reasons.total() > 40, "some were placed again"
    assert list(sim.router.tpot._latest).count(0.015) == 40


def test_an_unknown_worker_cannot_be_killed():
    sim = Simulation(Settings(prefill=1, decode=1, profile=PROFILE, stack=stack("ours")), synthetic("bursty", 5))
    with pytest.raises(ConfigError, match=r"worker p7.*p0, d0"):
        faults.kill(sim, "p7", 1.0, 1.0)
