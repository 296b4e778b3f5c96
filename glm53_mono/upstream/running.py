"""The server of this process, as it runs: what its steps look like, its longest context, and the layout of its keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ServedStep:
    """The steps that SGLang routes to a monokernel (kernel_plugins/amd/binding.py: _server_step).

    Attributes:
        mode: "decode", or "target_verify" where the server drafts.
        tokens_per_request: rows of a request in such a step.
    """

    mode: str
    tokens_per_request: int


def served_step() -> ServedStep:
    """What this server's routed steps are."""
    from sglang.srt.runtime_context import get_spec

    spec = get_spec()
    if spec.speculative_algorithm is None:
        return ServedStep("decode", 1)
    return ServedStep("target_verify", int(spec.speculative_num_draft_tokens or 1))


def longest_context(hf_config: Any) -> int:
    """Tokens that a request of this server may have: `--context-length`, else what the model says.

    Args:
        hf_config: SGLang's `Glm5NextConfig`.
    """
    from sglang.srt.runtime_context import get_model

    text = getattr(hf_config, "text_config", None) or hf_config
    return int(get_model().context_length or text.max_position_embeddings)


def index_keys_are_tiled() -> bool:
    """Whether pooled index keys lie in 16 x 16 tiles, as AITER's kernel wants them (kpool_fp8_index.py:29-56)."""
    from sglang.srt.layers.attention.dsa.utils import aiter_can_use_preshuffle_paged_mqa

    return bool(aiter_can_use_preshuffle_paged_mqa())
