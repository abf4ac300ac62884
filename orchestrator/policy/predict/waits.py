"""How long a job waits in the prefill queue, learned by what overtakes it there: by its length, and by its patience."""

from __future__ import annotations

from orchestrator.policy.predict.estimates import MIN_FIT_SAMPLES, LineFit

MEMORY = 50.0  # observations; queue waits change faster than a worker's speed
MAX_PER_BACKLOG = 2.0  # seconds of wait per second of backlog; a line fitted to an idle queue may be steeper
PATIENCE = 100  # by which a key has the bit length of the patience: in decimals both lengths are read


def kind(tokens: int, patience_s: float) -> int:
    """The key of a job's line. Short jobs overtake long ones, and all others overtake those that may wait for
    `patience_s` longer: so each power of two of its uncached tokens and of its patience in milliseconds has one. It
    does not depend on what is learned meanwhile: a job is looked for where one like it was observed."""
    length = tokens.bit_length()
    return length if patience_s <= 0 else length + PATIENCE * int(1e3 * patience_s).bit_length()


class Waits:
    """The lines: seconds of wait by seconds of backlog. `now` and `decisions`: as `Estimate` has them."""

    def __init__(self) -> None:
        self.lines: dict[int, LineFit] = {}

    def placed(self, tokens: int, patience_s: float, now: float, decisions: int) -> None:
        """A job like this will be queued."""
        if (line := self.lines.get(kind(tokens, patience_s))) is not None:
            line.put_on_trial(now, decisions, len(self.lines))

    def observe(
        self, tokens: int, patience_s: float, backlog_s: float, seconds: float, now: float, decisions: int
    ) -> None:
        """Take the wait of a job of this many uncached tokens that found `backlog_s` of work in the queue."""
        key = kind(tokens, patience_s)
        line = self.lines.get(key)
        if line is None:
            line = self.lines[key] = LineFit(1.0, memory=MEMORY)
        line.renew(now, decisions, len(self.lines))
        line.observe(backlog_s, seconds)

    def at(self, tokens: int, patience_s: float, backlog_s: float, now: float, decisions: int) -> float:
        """The predicted wait (s) of a job of this length at this backlog."""
        line = self.lines.get(kind(tokens, patience_s))
        if line is None or line.samples < MIN_FIT_SAMPLES or line.is_stale(now, decisions, len(self.lines)):
            return backlog_s
        # A line fitted to a short queue may be far too steep for a long one.
        return min(line.at(backlog_s), MAX_PER_BACKLOG * backlog_s + line.intercept)
