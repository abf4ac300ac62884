"""The simulated host tier: what the device evicts is loaded, here or to be sent elsewhere, and takes its time."""

import msgspec
import pytest

from orchestrator.config.settings import KVConfig
from orchestrator.simulator.engine.kv import KVPool
from orchestrator.simulator.engine.profile import PROFILES, Profile, load_profile
from orchestrator.simulator.loads import synthetic
from orchestrator.simulator.report import report
from orchestrator.simulator.settings import SHIPPED, Settings, stack
from orchestrator.simulator.simulation import Simulation
from orchestrator.simulator.trace import at_rate

PROFILE = load_profile(PROFILES / "h100-llama-8b.json")
SMALL = msgspec.structs.replace(PROFILE, blocks=8000)  # where prompts of agents evict one another


def test_what_the_device_evicts_the_host_tier_has_until_newer_blocks_need_the_room() -> None:
    pool = KVPool(4, 1, host_blocks=6)
    for first in (0, 4):
        keys = tuple(range(first, first + 4))
        assert pool.acquire(keys, 4) == 0
        assert pool.hit_units(keys) == pool.held_units(keys) == 0, "nothing is computed yet"
        pool.write(keys)
        pool.release(keys, 4)
    assert pool.hit_units((0, 1, 2, 3)) == 0 and pool.held_units((0, 1, 2, 3)) == 2, "a prefix loses its end first"
    assert pool.hit_units((4, 5)) == pool.held_units((4, 5)) == 2
    stored, removed, hosted = map(set, pool.take_changes())
    assert (stored, removed, hosted) == ({4, 5, 6, 7}, {2, 3}, {0, 1}) and not pool.dirty
    assert pool.acquire((8,), 2) == 0
    pool.release((8,), 2)
    assert not pool.holds(8) and pool.used == 0, "what was never computed is not cached"
    pool.forget()
    assert pool.held_units((4, 5)) == pool.held_units((0,)) == 0


def test_what_is_in_use_when_the_cache_is_emptied_is_not_cached_later() -> None:
    pool = KVPool(4)
    assert pool.acquire((1, 2), 2) == 0
    pool.write((1, 2))
    assert pool.acquire((1, 2, 3), 4) == 2 and pool.used == 4, "they share the blocks of two"
    pool.forget()
    assert pool.hit_units((1, 2)) == 0
    pool.release((1, 2, 3), 4)
    pool.release((1, 2), 2)
    assert pool.hit_units((1, 2)) == 0 and pool.used == 0


def simulated(profile: Profile, fetch: str, tier_blocks: int) -> Simulation:
    kv = KVConfig(fetch=fetch, host_tier_bytes=tier_blocks * profile.block_size * profile.kv_bytes_per_token)
    shipped = stack("ours:fixed", msgspec.structs.replace(SHIPPED, kv=kv))
    settings = Settings(prefill=2, decode=2, profile=profile, stack=shipped)
    return Simulation(settings, at_rate(synthetic("agents", 600, 1), 5.0)).run()


@pytest.mark.parametrize("fetch", ["off", "auto"])
def test_a_tier_saves_prompt_tokens_and_its_loads_take_time(fetch: str) -> None:
    without, tier = simulated(SMALL, fetch, 0), simulated(SMALL, fetch, 100_000)
    assert without.fetches.loaded_tokens == 0 < tier.fetches.loaded_tokens
    assert report(tier).prefix_hit > report(without).prefix_hit
    slow = simulated(msgspec.structs.replace(SMALL, host_bytes_per_s=1e8), fetch, 100_000)
    assert report(slow).ttft_p50_s > report(tier).ttft_p50_s
