"""Which split of a number of workers serves a load best, and how many workers are enough, by simulating every option.

The ways are: each split with the configuration's policies, `ratio.mode: auto`, and other projects' routers at an even
split. Printing them is the command line's part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from orchestrator.config.settings import Config, SLOConfig
from orchestrator.simulator.engine.profile import Profile
from orchestrator.simulator.report import SHARES, Goodput, Report, goodputs, report
from orchestrator.simulator.settings import CONDITIONAL, Settings, stack
from orchestrator.simulator.simulation import Simulation
from orchestrator.simulator.trace import Load, at_rate

MAX_SPLITS = 17  # to simulate; larger fleets get an evenly spread subset
FIELD_POLICIES = (
    "field:round_robin",
    "field:least_requests",
    "field:power_of_two",
    "field:prefix_hash",
    "field:llm_d",
    "field:dynamo_cost",
    CONDITIONAL,
)
AUTO, FIXED = "ours", "ours:fixed"
WARM_UP = 0.25  # share of the load's time that is not counted: the fleet is empty at first, and roles change


class FleetOption(msgspec.Struct, frozen=True):
    """A fleet and its policies."""

    prefill: int
    decode: int
    policy: str

    def __str__(self) -> str:
        fleet = f"{self.prefill}P{self.decode}D"
        if self.policy == FIXED:
            return f"{fleet} (aggregated)" if self.prefill == 0 else fleet
        return f"automatic, from {fleet}" if self.policy == AUTO else f"{self.policy.partition(':')[2]}, {fleet}"


class Outcome(msgspec.Struct, frozen=True):
    """The result of an option: a report at a given rate (`at`), or the goodput at each of `SHARES`."""

    option: FleetOption
    at: Report | None = None
    goodput: dict[float, Goodput] = {}

    @property
    def score(self) -> float:
        """The share of requests that met both objectives; without `at`, the highest rate at which 90% do."""
        return self.at.attained if self.at is not None else self.goodput[SHARES[0]].rate


class Question(msgspec.Struct, frozen=True):
    """A load, and everything about the fleet but its split and its policies."""

    load: Load
    profile: Profile
    slo: SLOConfig
    config: Config
    seed: int = 0

    def run(self, option: FleetOption, rate: float) -> Report:
        settings = Settings(
            prefill=option.prefill,
            decode=option.decode,
            profile=self.profile,
            stack=stack(option.policy, self.config),
            slo=self.slo,
            seed=self.seed,
        )
        return report(Simulation(settings, at_rate(self.load, rate)).run(), WARM_UP)


def splits(workers: int) -> list[int]:
    """Numbers of prefill workers to try, from none to all but one."""
    count = min(workers, MAX_SPLITS)
    return sorted({round(n * (workers - 1) / max(1, count - 1)) for n in range(count)})


def fleet_options(workers: int) -> list[FleetOption]:
    even = workers // 2
    found = [FleetOption(prefill, workers - prefill, FIXED) for prefill in splits(workers)]
    found.append(FleetOption(even, workers - even, AUTO))
    if even:
        found += [FleetOption(even, workers - even, name) for name in FIELD_POLICIES]
    return found


def outcome(question: Question, option: FleetOption, rate: float | None) -> Outcome:
    """Simulate an option at this rate (requests per second); with None find its goodput, from the load's rate on."""
    if rate is not None:
        return Outcome(option, at=question.run(option, rate))
    start = question.load.rate
    return Outcome(option, goodput=goodputs(lambda at: question.run(option, at), start * 0.8, start * 1.3))


def best(outcomes: Iterable[Outcome]) -> Outcome:
    """The best of our own ways. Among equal ones it is `auto`, which needs no choice of a split, then the one with
    fewest prefill workers."""
    ours = [found for found in outcomes if found.option.policy in (AUTO, FIXED)]
    return max(ours, key=lambda found: (round(found.score, 3), found.option.policy == AUTO, -found.option.prefill))


def fewest(
    question: Question, rate: float, share: float, most: int, prefill_share: float, done: Callable[[], None]
) -> FleetOption | None:
    """The fewest workers, at most `most`, with which `share` of the requests meet both objectives at `rate`.

    About `prefill_share` of the workers prefill (one worker more or less is tried too); 0 is the aggregated fleet.
    None if `most` workers are not enough. Calls `done` after each simulation.
    """

    def smallest_option(workers: int) -> FleetOption | None:
        near = min(workers - 1, round(prefill_share * workers))
        tried = {near} if prefill_share == 0 else {max(0, near - 1), near, min(workers - 1, near + 1)}
        for prefill in sorted(tried, key=lambda number: abs(number - near)):
            option = FleetOption(prefill, workers - prefill, FIXED)
            attained = question.run(option, rate).attained
            done()
            if attained >= share:
                return option
        return None

    low, high, found = 1, most, smallest_option(most)
    if found is None:
        return None
    while low < high:
        middle = (low + high) // 2
        option = smallest_option(middle)
        if option is None:
            low = middle + 1
        else:
            high, found = middle, option
    return found
