"""By how much KV takes longer over one link than over another, learned from transfers that have ended.

A link is known by its *class*: the names of the labels that have the same value at both of its ends, in order. A
worker's host is a label. Links of a class are taken to be alike.
"""

from __future__ import annotations

from orchestrator.config.values import Link
from orchestrator.policy.predict.estimates import MIN_FIT_SAMPLES, LineFit


class Links:
    """A line for each class: the exposed time of a transfer by the tokens whose KV was sent. As long as a class has too
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
