"""What is measured while serving: means, lines and recent maxima, and when they are too old to be believed; between
which workers no KV comes; and which objective counts where many requests share one.

An estimate that looks bad keeps away the very requests that would measure it again. So each has an age, in seconds and
in decisions. The older it is when it is observed again, the less its earlier observations count. One that is too old is
*stale*, and decisions take its prior. The first request that is placed by the prior is a trial: until it is measured,
or until the estimate is stale again, decisions take what was known. What the trial measures replaces what was known. So
a link that stays bad costs one request in `STALE_DECISIONS`, and at most one in `STALE_S`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from orchestrator.types import Link

FIT_MEMORY = 200.0  # chosen, not derived. Observations after which the weight of one has decayed to 1/e
MIN_FIT_SAMPLES = 8  # observations before a fit has both slope and intercept, and before a single worker's is used
MIN_RELATIVE_VARIANCE = 0.01  # of x, to fit both: then its standard deviation is a tenth of its mean
# An estimate is stale that was not renewed for both: so many seconds, and so many decisions for each of its kind. By
# time alone every request of a quiet fleet would be a trial; by number alone a busy one would have several a second.
# The shares of both that have passed are its age, of which the lesser counts.
STALE_S, STALE_DECISIONS = 60.0, 20
# A link is as fast as its fastest WRITE of this time, and of up to twice this time. It is longer than `STALE_S`: only
# another split tries a link again that this one does not use.
LINK_AGE_S = 300.0
LATEST = 64  # requests, whose objectives count
# Of pairs between which KV is late, or does not come.
LATE_IN_A_ROW = 2  # one may have been sent just before a connection broke, and the next one makes it anew
FIRST_REST_S, MOST_REST_S = 5.0, 60.0  # doubled with each prompt that tries it and is late
TRIAL_S = 10.0  # for which the prompt that tries it is alone, or until it is late
MOST_PAIRS = 16_384  # remembered, the latest: of an engine that has left nobody may be told


class Estimate:
    """Base of what is learned by observations. It knows when it was last renewed: observed, or put on trial."""

    __slots__ = ("_on_trial", "renewed_after", "renewed_at", "samples")  # renewed after so many decisions

    def __init__(self) -> None:
        self.samples = 0
        self._on_trial, self.renewed_at, self.renewed_after = False, math.inf, 0  # never stale before it is observed

    def age(self, now: float, decisions: int, kinds: int = 1) -> float:
        """How old it is: stale from 1 on, and always 0 before the first observation.

        `now`: seconds of the clock by which it is renewed. `decisions`: their number so far. `kinds`: how many
        estimates share these decisions.
        """
        if not self.samples:
            return 0.0
        return min((now - self.renewed_at) / STALE_S, (decisions - self.renewed_after) / (STALE_DECISIONS * kinds))

    def is_stale(self, now: float, decisions: int, kinds: int = 1) -> bool:
        """Whether its age is 1 or more, sooner told. It is not if it was renewed less than `STALE_S` ago."""
        return now - self.renewed_at >= STALE_S and decisions - self.renewed_after >= STALE_DECISIONS * kinds

    def put_on_trial(self, now: float, decisions: int, kinds: int = 1) -> bool:
        """A request was placed that will measure it. If it is stale, which is returned, the measurement replaces what
        is known."""
        stale = self.is_stale(now, decisions, kinds)
        if stale:
            self._on_trial, self.renewed_at, self.renewed_after = True, now, decisions
        return stale

    def renew(self, now: float, decisions: int, kinds: int = 1) -> None:
        """Call it before each observation of an estimate that can become stale."""
        age = self.age(now, decisions, kinds)
        if self._on_trial or age >= 1:
            self._restart()
        else:
            self._fade(math.exp(-age))
        self._on_trial, self.renewed_at, self.renewed_after = False, now, decisions

    def _fade(self, factor: float) -> None:
        """Multiply the weight of all observations so far."""
        raise NotImplementedError

    def _restart(self) -> None:
        """Let the next observation outweigh all that came before."""
        self._fade(0.0)


class Smoothed(Estimate):
    """An exponentially weighted mean that starts at its first value."""

    __slots__ = ("_most", "_n", "value")

    def __init__(self, value: float, weight: float) -> None:
        super().__init__()
        self.value, self._n, self._most = value, 0.0, 1.0 / weight

    def observe(self, value: float) -> None:
        self.samples += 1
        self._n = n = min(self._most, self._n + 1)
        self.value += (value - self.value) / n

    def _fade(self, factor: float) -> None:
        self._n *= factor


class LineFit(Estimate):
    """y = intercept + slope * x by least squares with exponential forgetting. Neither coefficient is ever negative.

    `memory` is the number of observations after which the weight of one has decayed to 1/e. While x varies too little
    to tell slope from intercept, the last line that was known is scaled as a whole, by least squares too. So one short
    prompt that took long does not make a long one seem a hundred times as slow.
    """

    __slots__ = ("_decay", "_error", "_known", "_n", "_x", "_xx", "_xy", "_y", "intercept", "prior", "slope")

    def __init__(self, slope: float, intercept: float = 0.0, memory: float = FIT_MEMORY) -> None:
        super().__init__()
        self._decay = math.exp(-1.0 / memory)
        self._n = self._x = self._y = self._xx = self._xy = 0.0
        self._error = Smoothed(0.0, weight=1.0 / memory)
        self.set_prior(slope, intercept)

    def set_prior(self, slope: float, intercept: float = 0.0) -> None:
        """Expect this line before the first observation, and while the estimate is stale."""
        self.prior = intercept, slope
        if not self.samples:
            self.intercept, self.slope = self._known = self.prior  # known: the prior, or the latest fit of both

    def at(self, x: float) -> float:
        return self.intercept + self.slope * x

    def error_at(self, x: float) -> float:
        """The mean absolute error of predictions; until there are `MIN_FIT_SAMPLES`, the whole prediction at x."""
        return self._error.value if self.samples >= MIN_FIT_SAMPLES else self.at(x)

    def observe(self, x: float, y: float) -> None:
        self._error.observe(abs(y - self.at(x)))
        decay = self._decay
        self.samples += 1
        self._n = n = self._n * decay + 1
        self._x = sx = self._x * decay + x
        self._y = sy = self._y * decay + y
        self._xx = sxx = self._xx * decay + x * x
        self._xy = sxy = self._xy * decay + x * y
        spread = n * sxx - sx * sx  # n squared times the variance of x
        if n > MIN_FIT_SAMPLES - 1 and spread > MIN_RELATIVE_VARIANCE * sx * sx:
            slope = (n * sxy - sx * sy) / spread
            intercept = (sy - slope * sx) / n
            if slope < 0:
                slope, intercept = 0.0, sy / n
            elif intercept < 0:
                slope, intercept = sxy / sxx, 0.0
            self.slope, self.intercept, self._known = slope, intercept, (intercept, slope)
            return
        fixed, each = self._known
        squares = fixed * fixed * n + 2 * fixed * each * sx + each * each * sxx
        if squares > 0:
            scale = (fixed * sy + each * sxy) / squares
            self.slope, self.intercept = scale * each, scale * fixed
        elif sxx > 0:
            self.slope, self.intercept = sxy / sxx, 0.0
        else:
            self.intercept = sy / n

    def _fade(self, factor: float) -> None:
        self._n *= factor
        self._x *= factor
        self._y *= factor
        self._xx *= factor
        self._xy *= factor
        self._error._fade(factor)

    def _restart(self) -> None:
        super()._restart()
        self.intercept, self.slope = self.prior  # by which the next one was predicted


class RecentMaximum:
    """The largest of the values that were seen in the last `age_s` to `2 * age_s` seconds; 0 if none was."""

    __slots__ = ("_age_s", "_before", "_began_at", "_largest")

    def __init__(self, age_s: float) -> None:
        self._age_s = age_s
        self._began_at = self._largest = self._before = 0.0

    def observe(self, value: float, now: float) -> None:
        self._turn(now)
        self._largest = max(self._largest, value)

    def at(self, now: float) -> float:
        self._turn(now)
        return max(self._largest, self._before)

    def _turn(self, now: float) -> None:
        """Begin another period of `age_s` once one has passed."""
        passed_s = now - self._began_at
        if passed_s >= self._age_s:
            self._before = self._largest if passed_s < 2 * self._age_s else 0.0
            self._largest, self._began_at = 0.0, now - passed_s % self._age_s


class Links:
    """By how much KV takes longer over one link than over another. A link is known by its *class*: the names of the
    labels with the same value at both of its ends, in order; a worker's host is a label. Those of a class are alike.

    Each class has a line: the exposed time of a transfer by the tokens whose KV was sent. As long as a class has too
    few measurements, and once the last ones are too old (`estimates`), it counts as no worse than the best one: so it
    is tried, and a bad time does not shut it for good."""

    def __init__(self) -> None:
        self._now, self._decisions = 0.0, 0
        self.lines: dict[Link, LineFit] = {}

    def begin(self, now: float) -> None:
        """Decide once more. `now`: seconds of a clock that never goes back."""
        self._now = now
        self._decisions += 1

    def chosen(self, link: Link) -> None:
        """KV will be sent over a link of this class."""
        if (line := self.lines.get(link)) is not None:
            line.put_on_trial(self._now, self._decisions, len(self.lines))

    def observe(self, link: Link, tokens: int, seconds: float) -> None:
        """Take the part of a transfer of so many tokens that came after the prefill."""
        line = self.lines.get(link)
        if line is None:
            line = self.lines[link] = LineFit(0.0)
        line.renew(self._now, self._decisions, len(self.lines))
        line.observe(tokens, seconds)

    def extra_s(self, link: Link, tokens: int) -> float:
        """Seconds by which the KV of so many tokens takes longer over such a link than over the fastest one."""
        its, kinds = self.lines.get(link), len(self.lines)
        if its is None or kinds < 2:
            return 0.0
        known = [
            line
            for line in self.lines.values()
            if line.samples >= MIN_FIT_SAMPLES and not line.is_stale(self._now, self._decisions, kinds)
        ]
        return its.at(tokens) - min(line.at(tokens) for line in known) if its in known else 0.0


@dataclass(slots=True)
class _Late:
    in_a_row: int = 0
    rest_s: float = FIRST_REST_S / 2
    rests_until: float = 0.0
    on_trial: bool = False


class LatePairs:
    """Pairs of a prefill and a decode worker between which no KV comes, though both are heard: a firewall, a cut link.
    Times are seconds of a clock that never goes back.

    Each prompt that is sent there waits for seconds, and the blocks that its decode worker has reserved for it stay so
    for longer; or its KV is refused, and it is computed twice. So a pair rests after a few such ones in a row, ever
    longer, and then one prompt tries it.
    """

    def __init__(self, in_a_row: int = LATE_IN_A_ROW) -> None:
        self._in_a_row = in_a_row
        self._pairs: dict[tuple[str, str], _Late] = {}  # those whose last KV was late

    def came(self, prefill: str, decode: str) -> None:
        """KV has come from one to the other."""
        self._pairs.pop((prefill, decode), None)

    def late(self, prefill: str, decode: str, now: float) -> bool:
        """It has not come, or not in time. Of many that were on their way together the first ones count: whether this
        one is of these."""
        pair = self._pairs.pop((prefill, decode), _Late())
        self._pairs[prefill, decode] = pair  # the latest last
        if len(self._pairs) > MOST_PAIRS:
            del self._pairs[next(iter(self._pairs))]
        counts = pair.in_a_row < self._in_a_row or pair.on_trial
        pair.in_a_row += 1
        if pair.in_a_row >= self._in_a_row and (pair.on_trial or now >= pair.rests_until):
            pair.rest_s = min(2 * pair.rest_s, MOST_REST_S)
            pair.rests_until, pair.on_trial = now + pair.rest_s, False
        return counts

    def resting(self, prefill: str, now: float) -> list[str]:
        """The decode workers to which this one is to send no KV now."""
        pairs = self._pairs.items()
        return [target for (source, target), pair in pairs if source == prefill and now < pair.rests_until]

    def tried(self, prefill: str, decode: str, now: float) -> None:
        """A prompt is sent that way. After a rest it is alone there until its KV has come, or has not."""
        pair = self._pairs.get((prefill, decode))
        if pair is not None and pair.in_a_row >= self._in_a_row:
            pair.rests_until, pair.on_trial = now + TRIAL_S, True

    def forget(self, worker_id: str) -> None:
        """It is gone."""
        self._pairs = {pair: late for pair, late in self._pairs.items() if worker_id not in pair}


class LatestObjective:
    """The objective of many at once: for what is claimed before those that come next, for who decodes beside whom, and
    for the split. A request's own one decides its own place, admission and deadline (`policies`).

    A tighter objective than the fleet's counts where that share of the latest requests has one as tight: clients
    name theirs, and a few of them do not slow down all others. A looser one does not count: the next may bring none.
    """

    def __init__(self, of_fleet_s: float, share: float, least_s: Callable[[], float] = lambda: 0.0) -> None:
        """Who brings a tighter one than `least_s` says, which nobody can meet, brings none."""
        self.seconds = self._of_fleet_s = of_fleet_s
        self.of_all_s = of_fleet_s  # what all of the latest have, or a tighter one: it costs nobody else
        self._least_s = least_s
        self._latest = deque([of_fleet_s] * LATEST, LATEST)
        self._tight = round(share * LATEST) - 1  # its place among the latest in order
        self._left = 0  # so many more requests until all of the latest have the fleet's

    def came(self, own_s: float | None) -> None:
        """The next request has come. None (or 0): it has no objective of its own."""
        own_s = own_s if own_s and own_s >= self._least_s() else None
        if not own_s and not self._left:
            return
        self._left = LATEST if own_s else self._left - 1
        self._latest.append(own_s or self._of_fleet_s)
        ordered = sorted(self._latest)
        self.seconds, self.of_all_s = [min(self._of_fleet_s, ordered[place]) for place in (self._tight, -1)]
