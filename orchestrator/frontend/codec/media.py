"""Images, videos and sounds in a prompt: who computes them, who gets their pixels, and what tells them apart.

The worker that prefills encodes them. One that decodes gets the KV and, of each medium, its place in the prompt and
what its positions follow from. Where it needs pixels after all, it gives the request back
(workers.vllm_engine.codec.withheld), and the next attempt has everything.
"""

from __future__ import annotations

import msgspec
from vllm.config import VllmConfig
from vllm.multimodal.utils import strip_covered_mm_data
from vllm.v1.engine import EngineCoreRequest

from orchestrator.policy.prefix_keys import Medium


class MediaRules(msgspec.Struct, frozen=True):
    """What the model permits. `remote`: another worker than the one that decodes may compute a prompt with media.
    `grid_positions`: positions follow from the sizes of images (M-RoPE), which every worker needs."""

    remote: bool = False
    grid_positions: bool = False

    @classmethod
    def of(cls, config: VllmConfig) -> MediaRules:
        model, media = config.model_config, config.model_config.multimodal_config
        # With pruning, positions follow from what the encoder finds; an encoder-decoder's media are no part of the
        # prompt; and a model without an encoder takes the media at each step.
        kept = media is not None and not media.is_multimodal_pruning_enabled()
        remote = kept and not model.is_encoder_decoder and not model.is_multimodal_raw_input_only_model
        return cls(remote=remote, grid_positions=bool(model.uses_mrope))


def media_of(request: EngineCoreRequest) -> list[Medium]:
    return [
        Medium(feature.identifier, feature.mm_position.offset, feature.mm_position.length)
        for feature in request.mm_features or ()
    ]


def without_pixels(request: EngineCoreRequest, rules: MediaRules) -> EngineCoreRequest:
    """The request for a worker that gets the KV of the prompt. It computes the prompt's last token by itself, so it
    gets the pixels of a medium that reaches it."""
    features, computed_tokens = request.mm_features or [], len(request.prompt_token_ids or ()) - 1
    kept = strip_covered_mm_data(features, computed_tokens, uses_mrope=rules.grid_positions)
    return msgspec.structs.replace(request, mm_features=kept)
