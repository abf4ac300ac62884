"""Transfer statistics of one worker: vLLM's NIXL ones per WRITE, and ours per request.

The lists grow during a step and are emptied with it; `VllmEngine` sums them.
"""

from __future__ import annotations

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlKVConnectorStats

# Per request pushed: seconds from first WRITE to last, and from the last chunk computed to everything landed.
STREAM_SECONDS = "pd_stream_seconds"
EXPOSED_SECONDS = "pd_exposed_seconds"
# One entry per occurrence.
STREAMS_FAILED = "pd_streams_failed"
RECEIVES_FAILED = "pd_receives_failed"
BAD_MESSAGES = "pd_bad_messages"
VERIFIED = "pd_verified"
CORRUPT = "pd_corrupt"
OURS = (STREAM_SECONDS, EXPOSED_SECONDS, STREAMS_FAILED, RECEIVES_FAILED, BAD_MESSAGES, VERIFIED, CORRUPT)


class PushStats(NixlKVConnectorStats):
    def reset(self) -> None:
        super().reset()
        self.data.update({name: [] for name in OURS})

    def record(self, name: str, value: float = 1.0) -> None:
        self.data[name].append(value)

    def is_empty(self) -> bool:
        return super().is_empty() and not any(self.data.get(name) for name in OURS)
