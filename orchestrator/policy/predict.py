"""Predictions of TTFT and ITL, from coefficients that are fitted online to measurements.

The router or the simulator measures; `placement` and `admission` read the predictions. Nothing here decides. Before the
first measurements the predictions come from priors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec

from orchestrator.policy.candidate import EXPECTED_OUTPUT_TOKENS, Candidate
from orchestrator.types import EngineSpeed, QueueDepth

# Chosen, not derived. Both memories count observations; queue waits change faster than a worker's speed.
FIT_MEMORY, WAIT_FIT_MEMORY = 200.0, 50.0
MIN_FIT_SAMPLES = 8  # observations before a fit has both slope and intercept, and before a single worker's is used
MIN_RELATIVE_VARIANCE = 0.01  # of x, to fit both: then its standard deviation is a tenth of its mean
MAX_WAIT_PER_BACKLOG = 2.0  # seconds of wait per second of backlog; a line fitted to an idle queue may be steeper
ITL_WEIGHT, OUTPUT_WEIGHT = 0.1, 0.01  # of a new observation in the running means of ITL and output length
Z_95 = 1.645  # standard deviations of a normal distribution, below which 95% of it are
MIN_AHEAD_TOKENS = 16.0  # lower bound of `Predictor.ahead_tokens`, however short outputs are


class Smoothed:
    """An exponentially weighted mean that starts at its first value."""

    __slots__ = ("_weight", "samples", "value")

    def __init__(self, value: float, weight: float) -> None:
        self.value, self._weight, self.samples = value, weight, 0

    def observe(self, value: float) -> None:
        self.samples += 1
        self.value += max(self._weight, 1.0 / self.samples) * (value - self.value)


class LineFit:
    """y = intercept + slope * x by least squares with exponential forgetting. Neither coefficient is ever negative.

    `memory` is the number of observations after which the weight of one has decayed to 1/e. While x varies too little
    to tell slope from intercept, the last line that was known is scaled as a whole, by least squares too. So one short
    prompt that took long does not make a long one seem a hundred times as slow.
    """

    __slots__ = ("_decay", "_error", "_known", "_n", "_x", "_xx", "_xy", "_y", "intercept", "samples", "slope")

    def __init__(self, slope: float, intercept: float = 0.0, memory: float = FIT_MEMORY) -> None:
        self.slope, self.intercept = slope, intercept
        self._known = (intercept, slope)  # the prior, or the latest fit of both
        self.samples = 0
        self._decay = math.exp(-1.0 / memory)
        self._n = self._x = self._y = self._xx = self._xy = 0.0
        self._error = Smoothed(0.0, weight=1.0 / memory)

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
        if self.samples >= MIN_FIT_SAMPLES and spread > MIN_RELATIVE_VARIANCE * sx * sx:
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


class Coefficients(msgspec.Struct, frozen=True):
    """The fitted coefficients, for display. Seconds, and seconds per token."""

    prefill_s: dict[str, tuple[float, float]]  # by worker: (fixed, per token)
    local_s: dict[str, tuple[float, float]]
    transfer_s: tuple[float, float]
    wait_s: dict[int, tuple[float, float]]  # by bit length of a job's uncached tokens: (fixed, per second of backlog)
    itl_s: dict[str, float]
    output_tokens: float
    speed: EngineSpeed = EngineSpeed()  # the speed that an engine measured at its start


class Predictor:
    """The fitted times of one fleet. The priors are a prefill worker's seconds per token and a decode worker's ITL."""

    def __init__(self, prior_s_per_token: float = 0.0005, prior_itl_s: float = 0.02) -> None:
        self._prior_itl_s = prior_itl_s
        self.speed = EngineSpeed()
        self._pool = LineFit(prior_s_per_token)
        self._prefill: dict[str, LineFit] = {}
        self._local: dict[str, LineFit] = {}
        self._transfer = LineFit(0.0, prior_itl_s)  # the decode engine's first token takes a step of its own
        self._wait: dict[int, LineFit] = {}
        self._itl: dict[str, Smoothed] = {}
        # Means over the same requests of all workers: TPOT, and sequences on the request's worker.
        self._tpot, self._sequences = Smoothed(prior_itl_s, 1 / FIT_MEMORY), Smoothed(1.0, 1 / FIT_MEMORY)
        self._output = Smoothed(EXPECTED_OUTPUT_TOKENS, weight=OUTPUT_WEIGHT)
        # Tokens that a decoding sequence has yet to generate: on average half of its output.
        self.ahead_tokens = EXPECTED_OUTPUT_TOKENS / 2

    def set_prior(self, speed: EngineSpeed) -> None:
        """Take the speed that an engine measured at its start as the prior of all workers, until requests are
        measured."""
        if speed.prefill_s_per_token <= 0 or speed == self.speed:
            return
        self.speed = speed
        self._prior_itl_s = speed.step_s + speed.step_s_per_sequence
        if not self._pool.samples:
            self._pool = LineFit(speed.prefill_s_per_token, speed.prefill_s)
        if not self._transfer.samples:
            self._transfer = LineFit(0.0, self._prior_itl_s)

    # ---- measured --------------------------------------------------------------------------------------------

    def observe_prefill(self, worker_id: str, tokens: int, seconds: float) -> None:
        """Take the time in which a prefill worker computed this many uncached tokens."""
        self._pool.observe(tokens, seconds)
        self._fit(self._prefill, worker_id).observe(tokens, seconds)

    def observe_local(self, worker_id: str, tokens: int, seconds: float) -> None:
        """Take the TTFT of a request that was prefilled on its decode worker. `tokens`: its uncached tokens and those
        that waited there before it."""
        self._fit(self._local, worker_id).observe(tokens, seconds)

    def observe_transfer(self, tokens: int, seconds: float) -> None:
        """Take the time from the end of a remote prefill to the decode engine's first token: the part of the KV
        transfer that does not overlap the prefill. `tokens`: the prompt's."""
        self._transfer.observe(tokens, seconds)

    def observe_wait(self, tokens: int, backlog_s: float, seconds: float) -> None:
        """Take the time from enqueueing to the start of the prefill, for a job of this many uncached tokens that found
        `backlog_s` of work in the queue."""
        bucket = tokens.bit_length()
        fit = self._wait.get(bucket)
        if fit is None:
            fit = self._wait[bucket] = LineFit(1.0, memory=WAIT_FIT_MEMORY)
        fit.observe(backlog_s, seconds)

    def observe_itl(self, worker_id: str, seconds: float, sequences: int = 1) -> None:
        """Take the TPOT of a request, delays by local prefills included. `sequences`: requests on its worker when it
        was placed there, itself included."""
        smoothed = self._itl.get(worker_id)
        if smoothed is None:
            smoothed = self._itl[worker_id] = Smoothed(seconds, weight=ITL_WEIGHT)
        smoothed.observe(seconds)
        self._tpot.observe(seconds)
        self._sequences.observe(sequences)

    def observe_output(self, tokens: int) -> None:
        self._output.observe(tokens)
        self.ahead_tokens = max(MIN_AHEAD_TOKENS, self._output.value / 2)

    def forget(self, worker_id: str) -> None:
        for fits in (self._prefill, self._local, self._itl):
            fits.pop(worker_id, None)

    # ---- predicted -------------------------------------------------------------------------------------------

    @property
    def output_tokens(self) -> float:
        return self._output.value

    @property
    def s_per_token(self) -> float:
        """Prefill seconds per additional prompt token."""
        return self._pool.slope

    def prefill_s(self, tokens: int) -> float:
        """Seconds in which a mean prefill worker computes a prompt of this many uncached tokens."""
        return self._pool.at(tokens)

    @property
    def prefill_line(self) -> tuple[float, float]:
        """The prefill time of one prompt: fixed seconds, and seconds per uncached token."""
        return self._pool.intercept, self._pool.slope

    def mean_itl_s(self, worker_ids: Iterable[str]) -> float:
        """The mean ITL of those of these workers that have been measured; the prior if none has."""
        values = [self._itl[worker_id].value for worker_id in worker_ids if worker_id in self._itl]
        return sum(values) / len(values) if values else self._prior_itl_s

    def backlog_s(self, queue: QueueDepth, workers_ready: int) -> float:
        """Seconds in which the prefill workers compute the waiting jobs."""
        return self._pool.slope * queue.tokens / max(1, workers_ready)

    def wait_s(self, tokens: int, backlog_s: float) -> float:
        """Queue wait of a job of this length at this backlog. Each power of two of the length has a fit of its own,
        because short jobs overtake long ones."""
        fit = self._wait.get(tokens.bit_length())
        if fit is None or fit.samples < MIN_FIT_SAMPLES:
            return backlog_s
        # A line fitted to a short queue may be far too steep for a long one.
        return min(fit.at(backlog_s), MAX_WAIT_PER_BACKLOG * backlog_s + fit.intercept)

    def remote_ttft_s(self, tokens: int, transfer_tokens: int, queue: QueueDepth, workers_ready: int) -> float:
        """TTFT of a remote prefill: queue wait, prefill of `tokens`, and transfer of the KV of `transfer_tokens`."""
        waited = self.wait_s(tokens, self.backlog_s(queue, workers_ready))
        return waited + self._pool.at(tokens) + self._transfer.at(transfer_tokens)

    def transfer_error_s(self, tokens: int) -> float:
        """The mean error (seconds) of the predicted time of a KV transfer of this many tokens."""
        return self._transfer.error_at(tokens)

    # Plain loops over locals: these run for every request, and over every worker of a small fleet.

    def local_ttft_s(self, candidates: Iterable[Candidate], prompt_tokens: int) -> list[float]:
        """For each candidate, the TTFT if it prefills the uncached part of a prompt after the prompts waiting there."""
        found: list[float] = []
        pool, prior_itl_s, fit_of, itl_of = self._pool, self._prior_itl_s, self._local.get, self._itl.get
        for candidate in candidates:
            worker_id = candidate.worker_id
            tokens = prompt_tokens - candidate.cached_tokens
            pending_tokens = candidate.waiting_tokens + candidate.placed_tokens + (tokens if tokens > 0 else 0)
            fit = fit_of(worker_id)
            if fit is None or fit.samples < MIN_FIT_SAMPLES:
                fit = pool
            smoothed = itl_of(worker_id)
            itl_s = prior_itl_s if smoothed is None else smoothed.value
            found.append(fit.intercept + fit.slope * pending_tokens + itl_s)
        return found

    def local_s(
        self, candidates: Iterable[Candidate], prompt_tokens: int, by_sequences: bool = False
    ) -> tuple[list[float], list[float]]:
        """`local_ttft_s`, and for each candidate the ITL of the sequences that decode there: a prefill delays each of
        them by its seconds, spread over `ahead_tokens`.

        The ITL is measured, and so as old as answers are long. `by_sequences`: where more sequences are than by chance
        (their number is about Poisson), it is at least the ITL of so many (`tpot_line`).
        """
        ttfts_s: list[float] = []
        itls_s: list[float] = []
        pool, prior_itl_s, fit_of, itl_of = self._pool, self._prior_itl_s, self._local.get, self._itl.get
        delay_s_per_token = pool.slope / self.ahead_tokens
        (fixed_s, each_s), usual = self.tpot_line, self._sequences.value
        burst = usual + Z_95 * math.sqrt(usual) if by_sequences else math.inf
        for candidate in candidates:
            worker_id = candidate.worker_id
            tokens = prompt_tokens - candidate.cached_tokens
            pending_tokens = candidate.waiting_tokens + candidate.placed_tokens + (tokens if tokens > 0 else 0)
            fit = fit_of(worker_id)
            if fit is None or fit.samples < MIN_FIT_SAMPLES:
                fit = pool
            smoothed = itl_of(worker_id)
            itl_s = prior_itl_s if smoothed is None else smoothed.value
            ttfts_s.append(fit.intercept + fit.slope * pending_tokens + itl_s)
            sequences = candidate.running + candidate.waiting
            if sequences > burst and fixed_s + each_s * sequences > itl_s:
                itl_s = fixed_s + each_s * sequences
            itls_s.append(itl_s + delay_s_per_token * pending_tokens)
        return ttfts_s, itls_s

    def itl_s(self, worker_id: str) -> float:
        smoothed = self._itl.get(worker_id)
        return smoothed.value if smoothed else self._prior_itl_s

    @property
    def tpot_line(self) -> tuple[float, float]:
        """The TPOT on a decode worker: fixed seconds, and seconds per sequence there, local prefills included.

        Fitted to the requests of all workers, since the TPOT measured on one worker is as old as its answers are long.
        A slower worker needs no line of its own: it keeps its sequences for longer, so it has more of them.
        """
        if not self._tpot.samples:
            return self._prior_itl_s, self.speed.step_s_per_sequence
        fixed_s = min(self.speed.step_s, self._tpot.value)
        return fixed_s, (self._tpot.value - fixed_s) / max(1.0, self._sequences.value)

    def coefficients(self) -> Coefficients:
        def pairs(fits: dict) -> dict:
            return {name: (fit.intercept, fit.slope) for name, fit in fits.items()}

        return Coefficients(
            prefill_s=pairs(self._prefill),
            local_s=pairs(self._local),
            transfer_s=(self._transfer.intercept, self._transfer.slope),
            wait_s=pairs(self._wait),
            itl_s={name: smoothed.value for name, smoothed in self._itl.items()},
            output_tokens=self._output.value,
            speed=self.speed,
        )

    def _fit(self, fits: dict[str, LineFit], worker_id: str) -> LineFit:
        fit = fits.get(worker_id)
        if fit is None:
            fit = fits[worker_id] = LineFit(self._pool.slope, self._pool.intercept)
        return fit
