"""What a step cannot read where SGLang put it: `build` copies it once, and SGLang keeps the record of the copies.

Two things, both where AITER serves: the router's bias, which SGLang then keeps in bf16 (deepseek_v2.py:522-530) and the
step reads in fp32; and the down matrix of a shared expert that is not fused, which lies in another order than those of
the routed experts while one loop reads both.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import replace

import torch
from torch import Tensor

from glm53_mono.weights import shuffled
from glm53_mono.weights.descriptor import Format, Layout, Matrix
from glm53_mono.weights.model import LayerWeights, MoeWeights

Copies = MutableMapping[tuple[str, int], Tensor]
"""Copies by what they are and the layer."""

BIAS = "router bias"
SHARED_DOWN = "shared expert's down"
SHARED_DOWN_SCALES = "shared expert's down scales"


def readable(layers: tuple[LayerWeights[Matrix], ...], copies: Copies) -> tuple[LayerWeights[Matrix], ...]:
    """The layers with copies in the place of what no loop reads; where there is nothing of that kind, the same layers.

    Args:
        layers: as SGLang holds them.
        copies: gets every copy.
    """
    return tuple(
        replace(layer, ffn=_readable(layer.ffn, index, copies)) if isinstance(layer.ffn, MoeWeights) else layer
        for index, layer in enumerate(layers)
    )


def total_bytes(copies: Copies) -> int:
    """Device memory that copies take."""
    return sum(tensor.numel() * tensor.element_size() for tensor in copies.values())


def relaid(matrix: Matrix, layout: Layout) -> Matrix:
    """A copy of a quantised matrix in another layout, its E8M0 scales too.

    Raises:
        WeightError: sizes that AITER's layout cannot hold.
    """
    to_aiter = layout == Layout.SHUFFLED
    scales = matrix.scales
    if to_aiter:
        shuffled.check_weights(matrix.name, matrix.data)
    data = shuffled.shuffled(matrix.data) if to_aiter else shuffled.unshuffled(matrix.data)
    if matrix.format == Format.MXFP4 and scales is not None:
        if to_aiter:
            shuffled.check_scales(f"the scales' tensor of {matrix.name}", scales)
        scales = shuffled.shuffled_scales(scales) if to_aiter else shuffled.unshuffled_scales(scales)
    return replace(matrix, data=data, layout=layout, scales=scales)


def _readable(ffn: MoeWeights[Matrix], layer: int, copies: Copies) -> MoeWeights[Matrix]:
    if ffn.bias.dtype != torch.float32:
        copies[BIAS, layer] = ffn.bias.float()
        ffn = replace(ffn, bias=copies[BIAS, layer])
    shared = ffn.shared
    if shared is None or shared.down.format != ffn.down.format or shared.down.layout == ffn.down.layout:
        return ffn
    down = relaid(shared.down, ffn.down.layout)
    copies[SHARED_DOWN, layer] = down.data
    if down.scales is not shared.down.scales:
        copies[SHARED_DOWN_SCALES, layer] = down.scales
    return replace(ffn, shared=replace(shared, down=down))
