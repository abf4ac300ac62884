"""The decode worker to which a prefill worker sends a prompt's KV, where the links between workers are not alike.

The decode choice picks one worker among those behind links of each class; this module picks one of these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from orchestrator.config.settings import SLOConfig
from orchestrator.policy.decode_choice import Candidate, DecodeChoice, RequestInfo, blocks_for
from orchestrator.policy.predict.predictor import Predictor
from orchestrator.types import Link

NEGLIGIBLE = 0.003  # of the TTFT objective


def pair(
    request: RequestInfo,
    candidates: Sequence[Candidate],
    links: Mapping[str, Link],
    choose: DecodeChoice,
    predictor: Predictor,
    slo: SLOConfig,
) -> Candidate | None:
    """The candidate with the least cost; None if there is none. `links`: by worker, to the one that prefills.

    The cost is the time that the KV takes longer than over the fastest link, as a share of the TTFT objective, and the
    square of the predicted TPOT, as a share of its objective, of the sequences and the prompts that are there. Where
    the request would have to wait for memory or for a place in the batch, so much of its duration counts as TTFT too.
    Equal ones are as near as possible. Where no link would make it later by a share of `NEGLIGIBLE`, links do not
    matter, and the decode choice alone chooses: it knows more of the workers, as what is cached there.
    """
    behind: dict[Link, list[Candidate]] = {}
    for candidate in candidates:
        behind.setdefault(links.get(candidate.worker_id, ()), []).append(candidate)
    if len(behind) < 2:
        return choose(request, candidates)
    best_of = {link: chosen for link, workers in behind.items() if (chosen := choose(request, workers)) is not None}
    extra_s = {
        link: predictor.links.extra_s(link, max(0, request.prompt_tokens - chosen.cached_tokens))
        for link, chosen in best_of.items()
    }
    if max(extra_s.values(), default=0.0) <= NEGLIGIBLE * slo.ttft_s:
        best = choose(request, sorted(candidates, key=lambda it: -len(links.get(it.worker_id, ()))))
    else:
        best = best_of[
            min(best_of, key=lambda link: (_cost(request, best_of[link], extra_s[link], predictor, slo), -len(link)))
        ]
    if best is not None:
        predictor.links.chosen(links.get(best.worker_id, ()))
    return best


def _cost(request: RequestInfo, candidate: Candidate, extra_s: float, predictor: Predictor, slo: SLOConfig) -> float:
    # Until this prompt is prefilled a decode worker computes about half as much, as its steps decode too.
    (fixed_s, each_s), done_s = predictor.tpot_line, predictor.prefill_s(request.prompt_tokens) / 2
    late_s = extra_s + _room_wait_s(request, candidate, predictor)
    pending_s = max(0.0, predictor.s_per_token * (candidate.waiting_tokens + candidate.placed_tokens) - done_s)
    sequences = candidate.running + candidate.waiting
    tpot = (fixed_s + each_s * sequences + pending_s / predictor.ahead_tokens) / slo.tpot_s
    return late_s / slo.ttft_s + tpot * tpot


def _room_wait_s(request: RequestInfo, candidate: Candidate, predictor: Predictor) -> float:
    """Seconds until it has memory and a place in its batch: the share of its requests that must end, times the duration
    of one."""
    sequences, out_tokens = candidate.running + candidate.waiting, 2 * predictor.ahead_tokens
    needed = request.prompt_tokens + out_tokens + candidate.waiting_tokens + sequences * predictor.ahead_tokens
    lacking = blocks_for(int(needed), candidate.block_size) - candidate.blocks_free
    excess = sequences + 1 - candidate.max_num_seqs
    if lacking <= 0 and excess <= 0:
        return 0.0
    must_end = max(lacking / max(1, candidate.blocks_total - candidate.blocks_free), excess / max(1, candidate.running))
    fixed_s, each_s = predictor.tpot_line
    return must_end * out_tokens * (fixed_s + each_s * sequences)
