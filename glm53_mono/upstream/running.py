"""The server of this process, as it runs: its steps, its longest context, the layout of its keys, its metrics."""

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


def metrics_are_on(rank: int) -> bool:
    """Whether this process writes metrics, as SGLang's own schedulers do (metrics_collector.py: init_new).

    Args:
        rank: of this process among those that share the model.
    """
    from sglang.srt.runtime_context import get_observability

    observability = get_observability()
    return bool(observability.enable_metrics and (rank == 0 or observability.enable_metrics_for_all_schedulers))
