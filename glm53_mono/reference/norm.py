"""RMSNorm and LayerNorm with SGLang's roundings."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm in fp32, the weight included, with one rounding at the end (srt/layers/layernorm.py:828).

    Args:
        x: [rows, n] bf16.
        weight: [n] bf16.
        eps: added to the mean square.

    Returns:
        [rows, n] bf16.
    """
    values = x.float()
    normalised = values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + eps)
    return (normalised * weight.float()).bfloat16()


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """LayerNorm in fp32 with one rounding at the end (srt/layers/layernorm.py:1019-1049).

    Args:
        x: [rows, n] bf16.
        weight: [n] fp32.
        bias: [n] fp32.
        eps: added to the variance.

    Returns:
        [rows, n] bf16.
    """
    return F.layer_norm(x.float(), (x.shape[-1],), weight, bias, eps).bfloat16()
