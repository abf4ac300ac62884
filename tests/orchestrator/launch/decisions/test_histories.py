"""Histories of several launchers: who acts when, on how old a reading, and who dies meanwhile, is by chance."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support_launchers import Host, Worker, World

from orchestrator.types import DesiredRatio, Role

QUIET_ROUNDS = 60  # more than any fleet here needs


def on_host(step: Callable[[World, Host], None]) -> Callable[[World, int], None]:
    def run(world: World, n: int) -> None:
        if world.hosts:
            step(world, world.hosts[n % len(world.hosts)])

    return run


def on_worker(step: Callable[[World, Worker], None]) -> Callable[[World, int], None]:
    def run(world: World, n: int) -> None:
        if world.workers:
            step(world, world.workers[n % len(world.workers)])

    return run


def scale(world: World, n: int) -> None:
    """Not while all are being replaced: the only worker of a role may be the next."""
    if all(process.generation == world.generation for process in world.workers):
        world.desired = DesiredRatio(1 + n % 3, 1 + n // 3 % 3)


def replace_all(world: World, n: int) -> None:
    """Where nobody is alone in its role."""
    wanted = (world.desired.prefill, world.desired.decode)
    if min(wanted) > 1 and world.shape() == wanted:
        world.generation += 1


def another(world: World, n: int) -> None:
    if len(world.hosts) < 4:
        world.up()


def read_and_act(world: World, host: Host) -> None:
    world.read(host)
    world.act(host)


LIFE = {
    "read": on_host(World.read),
    "act": on_host(World.act),
    "read and act": on_host(read_and_act),
    "notice": on_host(World.notice),
    "beat": on_worker(World.beat),
    "move": on_worker(World.move),
    "scale": scale,
    "replace all": replace_all,
    "another launcher": another,
}
DEATHS = {
    "die": on_worker(World.die),
    "kill": on_host(World.kill),
    "expire": lambda world, n: world.expire(n),
}


def histories(steps: dict) -> st.SearchStrategy:
    return st.lists(st.tuples(st.sampled_from(sorted(steps)), st.integers(0, 11)), max_size=120)


def settle(world: World) -> None:
    """Nobody dies any more, and everybody is prompt. Returns when nothing changes any more."""
    world.expire()
    if not world.hosts:
        world.up()
    still = 0
    for _ in range(QUIET_ROUNDS):
        before = world.picture()
        for host in list(world.hosts):
            world.notice(host)
            read_and_act(world, host)
        for step in (World.beat, World.move, World.beat):
            for process in list(world.workers):
                step(world, process)
        still = still + 1 if world.picture() == before else 0
        if still == 2:
            return
        for host in world.hosts:
            world.give_up(host)
    pytest.fail(f"still not quiet: {world.picture()}")


def settled(prefill: int, decode: int, launchers: int) -> World:
    world = World(prefill, decode, launchers)
    settle(world)
    assert world.shape() == (prefill, decode)
    return world


launchers = st.integers(1, 3)
ordered = st.integers(1, 3)


@settings(max_examples=400)
@given(ordered, ordered, launchers, histories(LIFE | DEATHS))
def test_fleet_reaches_desired_ratio_after_any_faults(prefill, decode, count, history):
    world = settled(prefill, decode, count)
    for name, n in history:
        (LIFE | DEATHS)[name](world, n)
    settle(world)
    assert world.shape() == (world.desired.prefill, world.desired.decode)
    assert len(world.workers) == sum(world.shape())


@settings(max_examples=400)
@given(ordered, ordered, launchers, histories(LIFE))
def test_roles_keep_a_worker_unless_it_dies(prefill, decode, count, history):
    world = settled(prefill, decode, count)
    for name, n in history:
        LIFE[name](world, n)
        assert all(world.serving(role) for role in Role), f"{name} {n}: {world.picture()}"
