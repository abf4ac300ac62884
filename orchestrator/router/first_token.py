"""The first token of a remote prefill, twice sampled: by prefill at its end, by decode once the KV has come.

Prefill's goes to the client at once; decode's own is then dropped where it is the same, and the attempt given up
where it is not, since what a client has read cannot be taken back. Decides and remembers; sends nothing.
"""

from __future__ import annotations

import logging
from typing import Any

from orchestrator import metrics
from orchestrator.router.codec import Batch, Codec
from orchestrator.router.request import ActiveRequest, State
from orchestrator.wire.messages import MessageError, Prefilled

log = logging.getLogger("pd.router")

# vLLM's FinishReason: a prefill that ended by its length of one token. Any other has more to say than a token.
FINISH_LENGTH = 1


class FirstToken:
    def __init__(self, codec: Codec, from_prefill: bool) -> None:
        """`from_prefill`: the configuration's `routing.first_token`."""
        self._codec, self._from_prefill = codec, from_prefill

    def wanted(self, request: Any, active: ActiveRequest) -> bool:
        """Whether prefill's token may be handed over: decode will sample the same one, more are to follow, and where
        decode's differs after all the answer can go on from what was sent."""
        more = active.info.max_new_tokens > 1
        return self._from_prefill and more and active.resumable and self._codec.early(request)

    def of_prefill(self, active: ActiveRequest, said: Prefilled, payload: list[bytes], now: float) -> Batch | None:
        """The first output of the answer, to be sent at once. None: decode's, if it is not here yet, will be."""
        if not active.early_wanted or active.state is not State.TRANSFERRING or active.tokens or not payload:
            return None
        if said.worker_id != active.prefill_worker:
            return None  # decode's KV, and so its token, come from another
        try:
            batch = self._codec.decode_outputs(payload, said.sent_at, now)
        except MessageError as error:
            metrics.dropped.labels("corrupt").inc()
            log.error("worker %s sent a first token that cannot be read: %s", said.worker_id, error)
            return None
        output = batch.outputs[0]
        if output.finish_reason != FINISH_LENGTH:
            return None  # the token ends the answer: how, decode's engine says
        (active.early,) = output.new_token_ids
        active.tokens.append(active.early)
        active.first_token_at = now
        metrics.first_tokens_early.inc()
        batch.outputs = [self._codec.as_first(output)]
        return batch

    def agreed(self, active: ActiveRequest, output: Any) -> bool:
        """Of decode's first output: prefill's token, if one was sent, is taken out of it. False when it begins with
        another one."""
        if active.early is None:
            return True
        if output.new_token_ids[0] != active.early:
            metrics.first_token_mismatches.inc()
            return False
        active.early = None
        self._codec.drop_first(output)
        return True
