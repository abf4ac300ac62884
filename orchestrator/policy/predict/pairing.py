"""The decode worker to which a prefill worker sends a prompt's KV, where the links between workers are not alike.

The decode choice picks one worker among those behind links of each class; this module picks one of these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from orchestrator.config.settings import SLOConfig
from orchestrator.policy.candidate import Candidate, DecodeChoice, RequestInfo, blocks_for
from orchestrator.policy.predict.links import Link
from orchestrator.policy.predict.predictor import Predictor

_STRICT = "strict:"


def strict_label(pairing: str) -> str:
    """The label whose value must be the same at both ends of a link; empty where any link may be used. `pairing`:
    routing.pairing."""
    return pairing.removeprefix(_STRICT) if pairing.startswith(_STRICT) else ""


def permits(pairing: str, link: Link) -> bool:
    """Whether KV may pass over such a link."""
    return not (label := strict_label(pairing)) or label in link


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
    Equal ones are as near as possible.
    """
    behind: dict[Link, list[Candidate]] = {}
    for candidate in candidates:
        behind.setdefault(links.get(candidate.worker_id, ()), []).append(candidate)
    if len(behind) < 2:
        return choose(request, candidates)
    # Until this prompt is prefilled a decode worker computes about half as much, as its steps decode too.
    (fixed_s, each_s), done_s = predictor.tpot_line, predictor.prefill_s(request.prompt_tokens) / 2
    best: Candidate | None = None
    over: Link = ()
    least = float("inf"), 0
    for link, workers in behind.items():
        chosen = choose(request, workers)
        if chosen is None:
            continue
        tokens = max(0, request.prompt_tokens - chosen.cached_tokens)
        late_s = predictor.links.extra_s(link, tokens) + _room_wait_s(request, chosen, predictor)
        pending_s = max(0.0, predictor.s_per_token * (chosen.waiting_tokens + chosen.placed_tokens) - done_s)
        sequences = chosen.running + chosen.waiting
        tpot = (fixed_s + each_s * sequences + pending_s / predictor.ahead_tokens) / slo.tpot_s
        cost = late_s / slo.ttft_s + tpot * tpot, -len(link)
        if best is None or cost < least:
            best, least, over = chosen, cost, link
    predictor.links.chosen(over)
    return best


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
