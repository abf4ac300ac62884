"""Predictions of TTFT and ITL, from coefficients that are fitted online to measurements.

The router or the simulator measures; `placement` and `admission` read the predictions. Nothing here decides. Before the
first measurements, and where the last ones are too old (`estimates`), the predictions come from priors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec

from orchestrator.policy.decode_choice import EXPECTED_OUTPUT_TOKENS, Candidate
from orchestrator.policy.predict.adapters import PRIOR_LOAD_S
from orchestrator.policy.predict.estimates import (
    FIT_MEMORY,
    MIN_FIT_SAMPLES,
    STALE_DECISIONS,
    STALE_S,
    Estimate,
    LineFit,
    Links,
    Smoothed,
)
from orchestrator.types import EngineSpeed, QueueDepth

WAIT_FIT_MEMORY = 50.0  # observations; queue waits change faster than a worker's speed
MAX_WAIT_PER_BACKLOG = 2.0  # seconds of wait per second of backlog; a line fitted to an idle queue may be steeper
ITL_WEIGHT, OUTPUT_WEIGHT = 0.1, 0.01  # of a new observation in the running means of ITL and output length
PRIOR_S_PER_TOKEN = 0.0005  # of prefill, until the first one has been measured
Z_95 = 1.645  # standard deviations of a normal distribution, below which 95% of it are
MIN_AHEAD_TOKENS = 16.0  # lower bound of `Predictor.ahead_tokens`, however short outputs are


class Coefficients(msgspec.Struct, frozen=True):
    """The fitted coefficients, for display. Seconds, and seconds per token."""

    prefill_s: dict[str, tuple[float, float]]  # by worker: (fixed, per token)
    local_s: dict[str, tuple[float, float]]
    transfer_s: tuple[float, float]
    wait_s: dict[int, tuple[float, float]]  # by bit length of a job's uncached tokens: (fixed, per second of backlog)
    itl_s: dict[str, float]
    output_tokens: float
    links: dict[str, tuple[float, float, int]]  # by the labels at both ends: (fixed, per token sent, transfers)
    speed: EngineSpeed = EngineSpeed()  # the speed that an engine measured at its start


class Predictor:
    """The fitted times of one fleet. The priors are a prefill worker's seconds per token and a decode worker's ITL.

    What is learned of requests that a decision can keep away becomes stale (`estimates`). The mean TPOT and output
    length do not: every request renews them.
    """

    def __init__(self, prior_s_per_token: float = PRIOR_S_PER_TOKEN, prior_itl_s: float = 0.02) -> None:
        self._prior_itl_s = prior_itl_s
        self._now, self._decisions = 0.0, 0
        self.speed = EngineSpeed()
        self._pool = LineFit(prior_s_per_token)
        # The prefill time of one prompt: fixed seconds, and seconds per uncached token. A decision asks for it often.
        self.prefill_line = self._pool.prior
        self._prefill: dict[str, LineFit] = {}
        self._local: dict[str, LineFit] = {}
        self._transfer = LineFit(0.0, prior_itl_s)  # the decode engine's first token takes a step of its own
        self.links = Links()
        self._wait: dict[int, LineFit] = {}
        self._itl: dict[str, Smoothed] = {}
        # Means over the same requests of all workers: TPOT, and sequences on the request's worker.
        self._tpot, self._sequences = Smoothed(prior_itl_s, 1 / FIT_MEMORY), Smoothed(1.0, 1 / FIT_MEMORY)
        self._output = Smoothed(EXPECTED_OUTPUT_TOKENS, weight=OUTPUT_WEIGHT)
        self.adapter_load_s = PRIOR_LOAD_S
        # Tokens that a decoding sequence has yet to generate: on average half of its output.
        self.ahead_tokens = EXPECTED_OUTPUT_TOKENS / 2

    def set_prior(self, speed: EngineSpeed) -> None:
        """Take the speed that an engine measured at its start as the prior of all workers, until requests are
        measured."""
        if speed.prefill_s_per_token <= 0 or speed == self.speed:
            return
        self.speed = speed
        self._prior_itl_s = speed.step_s + speed.step_s_per_sequence
        self._pool.set_prior(speed.prefill_s_per_token, speed.prefill_s)
        self.prefill_line = self._line(self._pool)
        self._transfer.set_prior(0.0, self._prior_itl_s)

    # ---- decisions -------------------------------------------------------------------------------------------

    def begin(self, now: float) -> None:
        """Predict for one more decision. `now`: seconds of a clock that never goes back, until the next one."""
        self._now = now
        self._decisions += 1
        self.prefill_line = self._line(self._pool)

    def placed_remotely(self, tokens: int) -> None:
        """Take note that the decision was for a remote prefill of so many tokens."""
        if self._put_on_trial(self._pool):
            self.prefill_line = self._line(self._pool)
        self._put_on_trial(self._transfer)
        self._put_on_trial(self._wait.get(tokens.bit_length()), len(self._wait))

    def placed_locally(self, worker_id: str) -> None:
        """Take note that the decision was for a prefill by this decode worker."""
        self._put_on_trial(self._local.get(worker_id), len(self._local))
        self._put_on_trial(self._itl.get(worker_id), len(self._itl))

    def _put_on_trial(self, estimate: Estimate | None, kinds: int = 1) -> bool:
        """Returns whether it was stale. Then it is on trial: decisions take what was known instead of its prior."""
        if estimate is None or self._now - estimate.renewed_at < STALE_S:
            return False
        return estimate.put_on_trial(self._now, self._decisions, kinds)

    # ---- measured --------------------------------------------------------------------------------------------

    def observe_prefill(self, worker_id: str, tokens: int, seconds: float) -> None:
        """Take the time in which a prefill worker computed this many uncached tokens."""
        self._observe(self._pool, tokens, seconds)
        self.prefill_line = self._line(self._pool)
        self._observe(self._fit(self._prefill, worker_id), tokens, seconds, len(self._prefill))

    def observe_local(self, worker_id: str, tokens: int, seconds: float) -> None:
        """Take the TTFT of a request that was prefilled on its decode worker. `tokens`: its uncached tokens and those
        that waited there before it."""
        self._observe(self._fit(self._local, worker_id), tokens, seconds, len(self._local))

    def observe_transfer(self, tokens: int, seconds: float) -> None:
        """Take the time from the end of a remote prefill to the decode engine's first token: the part of the KV
        transfer that does not overlap the prefill. `tokens`: the prompt's."""
        self._observe(self._transfer, tokens, seconds)

    def observe_wait(self, tokens: int, backlog_s: float, seconds: float) -> None:
        """Take the time from enqueueing to the start of the prefill, for a job of this many uncached tokens that found
        `backlog_s` of work in the queue."""
        bucket = tokens.bit_length()
        fit = self._wait.get(bucket)
        if fit is None:
            fit = self._wait[bucket] = LineFit(1.0, memory=WAIT_FIT_MEMORY)
        self._observe(fit, backlog_s, seconds, len(self._wait))

    def observe_itl(self, worker_id: str, seconds: float, sequences: int = 1) -> None:
        """Take the TPOT of a request, delays by local prefills included. `sequences`: requests on its worker when it
        was placed there, itself included."""
        smoothed = self._itl.get(worker_id)
        if smoothed is None:
            smoothed = self._itl[worker_id] = Smoothed(seconds, weight=ITL_WEIGHT)
        smoothed.renew(self._now, self._decisions, len(self._itl))
        smoothed.observe(seconds)
        self._tpot.observe(seconds)
        self._sequences.observe(sequences)

    def observe_output(self, tokens: int) -> None:
        self._output.observe(tokens)
        self.ahead_tokens = max(MIN_AHEAD_TOKENS, self._output.value / 2)

    def _observe(self, fit: LineFit, x: float, y: float, kinds: int = 1) -> None:
        fit.renew(self._now, self._decisions, kinds)
        fit.observe(x, y)

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
        return self.prefill_line[1]

    @property
    def adapter_load_tokens(self) -> int:
        """Prompt tokens that are computed in the time in which a LoRA adapter is loaded."""
        return int(self.adapter_load_s / self.s_per_token) if self.s_per_token else 0

    @property
    def rest_s(self) -> float:
        """Mean seconds until a sequence that decodes now has ended."""
        return self.ahead_tokens * self._tpot.value

    @property
    def arrivals_per_s(self) -> float:
        """Requests that come to a decode worker in a second, by Little's law: the mean number of those that each found
        there, divided by the time that one stays."""
        stay_s = self._output.value * self._tpot.value
        return max(0.0, self._sequences.value - 1) / stay_s if stay_s > 0 else 0.0

    def prefill_s(self, tokens: int) -> float:
        """Seconds in which a mean prefill worker computes a prompt of this many uncached tokens."""
        fixed_s, s_per_token = self.prefill_line
        return fixed_s + s_per_token * tokens

    def mean_itl_s(self, worker_ids: Iterable[str]) -> float:
        """The mean ITL of those of these workers that have been measured; the prior if none has."""
        values = [self.itl_s(worker_id) for worker_id in worker_ids if worker_id in self._itl]
        return sum(values) / len(values) if values else self._prior_itl_s

    def backlog_s(self, queue: QueueDepth, workers_ready: int) -> float:
        """Seconds in which the prefill workers compute the waiting jobs."""
        return self.prefill_line[1] * queue.tokens / max(1, workers_ready)

    def wait_s(self, tokens: int, backlog_s: float) -> float:
        """Queue wait of a job of this length at this backlog. Each power of two of the length has a fit of its own,
        because short jobs overtake long ones."""
        fit = self._wait.get(tokens.bit_length())
        if fit is None or fit.samples < MIN_FIT_SAMPLES or self._is_stale(fit, len(self._wait)):
            return backlog_s
        # A line fitted to a short queue may be far too steep for a long one.
        return min(fit.at(backlog_s), MAX_WAIT_PER_BACKLOG * backlog_s + fit.intercept)

    def remote_s(self, tokens: int, transfer_tokens: int, queue: QueueDepth, workers_ready: int) -> tuple[float, float]:
        """The TTFT of a remote prefill in two parts: the queue wait, and prefill of `tokens` with the transfer of the
        KV of `transfer_tokens`."""
        (prefill_s, each_s), (transfer_s, each_sent_s) = self.prefill_line, self._line(self._transfer)
        wait_s = self.wait_s(tokens, each_s * queue.tokens / max(1, workers_ready))
        return wait_s, prefill_s + each_s * tokens + transfer_s + each_sent_s * transfer_tokens

    def transfer_s(self, tokens: int) -> float:
        """The predicted time of a KV transfer of this many tokens."""
        fixed_s, each_s = self._line(self._transfer)
        return fixed_s + each_s * tokens

    def transfer_error_s(self, tokens: int) -> float:
        """The mean error (seconds) of the predicted time of a KV transfer of this many tokens."""
        fit = self._transfer
        if self._now - fit.renewed_at < STALE_S or not self._is_stale(fit):
            return fit.error_at(tokens)
        return self.transfer_s(tokens)  # the whole prediction, by its prior

    def _is_stale(self, estimate: Estimate, kinds: int = 1) -> bool:
        """What each decision calls looks at `renewed_at` before: where an estimate is fresh by time, two calls less."""
        return estimate.is_stale(self._now, self._decisions, kinds)

    def _line(self, fit: LineFit) -> tuple[float, float]:
        """Intercept and slope to predict by."""
        fresh = self._now - fit.renewed_at < STALE_S or not self._is_stale(fit)
        return (fit.intercept, fit.slope) if fresh else fit.prior

    def itl_s(self, worker_id: str) -> float:
        smoothed = self._itl.get(worker_id)
        if smoothed is None or self._is_stale(smoothed, len(self._itl)):
            return self._prior_itl_s
        return smoothed.value

    def local_ttft_s(self, candidates: Iterable[Candidate], prompt_tokens: int) -> list[float]:
        """For each candidate, the TTFT if it prefills the uncached part of a prompt after the prompts waiting there."""
        return [ttft_s for _, ttft_s, _, _ in self._local_s(candidates, prompt_tokens, math.inf)]

    def local_s(
        self, candidates: Iterable[Candidate], prompt_tokens: int, by_sequences: bool = False, most_s: float = math.inf
    ) -> list[tuple[Candidate, float, float]]:
        """The candidates whose `local_ttft_s` is at most `most_s`, each with that, and with the ITL of the sequences
        that decode there: a prefill delays each of them by its seconds, spread over `ahead_tokens`.

        The ITL is measured, and so as old as answers are long. `by_sequences`: where more sequences are than by chance
        (their number is about Poisson), it is at least the ITL of so many (`tpot_line`).
        """
        sooner = self._local_s(candidates, prompt_tokens, most_s)
        if not sooner:
            return []
        delay_s_per_token = self.prefill_line[1] / self.ahead_tokens
        step_s, each_s, burst = 0.0, 0.0, math.inf
        if by_sequences:
            (step_s, each_s), usual = self.tpot_line, self._sequences.value
            burst = usual + Z_95 * math.sqrt(usual)
        found = []
        for candidate, ttft_s, itl_s, pending_tokens in sooner:
            sequences = candidate.running + candidate.waiting
            if sequences > burst and step_s + each_s * sequences > itl_s:
                itl_s = step_s + each_s * sequences
            found.append((candidate, ttft_s, itl_s + delay_s_per_token * pending_tokens))
        return found

    def _local_s(
        self, candidates: Iterable[Candidate], prompt_tokens: int, most_s: float
    ) -> list[tuple[Candidate, float, float, int]]:
        """The candidates whose TTFT is at most `most_s`, each with that, its measured ITL, and the tokens to prefill
        there, those of the prompt included. No time is negative: one part that is longer than `most_s` is enough."""
        # A plain loop, with `_is_stale` and `itl_s` written out: for each request, over each worker of a small fleet.
        found = []
        pool, prior_itl_s, fit_of, itl_of = self.prefill_line, self._prior_itl_s, self._local.get, self._itl.get
        long_ago = self._now - STALE_S
        fits_before = self._decisions - STALE_DECISIONS * len(self._local)
        itls_before = self._decisions - STALE_DECISIONS * len(self._itl)
        for candidate in candidates:
            worker_id = candidate.worker_id
            tokens = prompt_tokens - candidate.cached_tokens
            pending_tokens = candidate.waiting_tokens + candidate.placed_tokens + (tokens if tokens > 0 else 0)
            fit = fit_of(worker_id)
            if fit is None or fit.samples < MIN_FIT_SAMPLES:
                fixed_s, s_per_token = pool
            elif fit.renewed_at <= long_ago and fit.renewed_after <= fits_before:
                fixed_s, s_per_token = pool
            else:
                fixed_s, s_per_token = fit.intercept, fit.slope
            ttft_s = fixed_s + s_per_token * pending_tokens
            if ttft_s > most_s:
                continue  # with its ITL it is longer still
            smoothed = itl_of(worker_id)
            if smoothed is None or (smoothed.renewed_at <= long_ago and smoothed.renewed_after <= itls_before):
                itl_s = prior_itl_s
            else:
                itl_s = smoothed.value
            ttft_s += itl_s
            if ttft_s <= most_s:
                found.append((candidate, ttft_s, itl_s, pending_tokens))
        return found

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
            links={",".join(it): (line.intercept, line.slope, line.samples) for it, line in self.links.lines.items()},
            speed=self.speed,
        )

    def _fit(self, fits: dict[str, LineFit], worker_id: str) -> LineFit:
        fit = fits.get(worker_id)
        if fit is None:
            fit = fits[worker_id] = LineFit(self._pool.slope, self._pool.intercept)
        return fit
