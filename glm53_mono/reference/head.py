"""The end of the model: the streams' mean, the final norm, the logits."""

from __future__ import annotations

from torch import Tensor

from glm53_mono.geometry import Geometry
from glm53_mono.reference import mhc, numerics
from glm53_mono.reference.norm import rms_norm


def hidden_states(streams: Tensor, norm: Tensor, geometry: Geometry) -> Tensor:
    """What the model hands to its logits processor and to the draft model.

    Args:
        streams: [rows, streams, hidden] bf16 after the last layer.
        norm: [hidden] bf16.
        geometry: sizes of one rank.

    Returns:
        [rows, hidden] bf16.
    """
    return rms_norm(mhc.contract(streams), norm, geometry.rms_eps)


def logits(hidden: Tensor, head: Tensor) -> Tensor:
    """Logits [rows, vocab] fp32 of hidden states [rows, hidden] bf16.

    The GEMM rounds them to bf16 (logits_processor.py:1199, 1368).
    """
    return numerics.linear(hidden, head).float()
