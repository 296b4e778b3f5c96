"""Models whose matrices are stored in other formats than bf16, as the published checkpoints store them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from glm53_mono.weights import bf16, fp8, mxfp4
from glm53_mono.weights.descriptor import Format, Matrix
from glm53_mono.weights.model import MlaWeights, ModelWeights, with_matrices
from tests.kernels.rig import TINY, Model

TINY_BLOCKS = replace(TINY, q_rank=128, expert_width=128)
"""Whole blocks of 128 in every matrix."""

MLA = ("attention.query_latent", "attention.query", "attention.output")
INDEXER = ("attention.indexer.query", "attention.indexer.key")
DENSE = ("dense.gate_up", "dense.down")
EXPERTS = ("ffn.gate_up", "ffn.down", "ffn.shared.gate_up", "ffn.shared.down")

FP8_CHECKPOINT = dict.fromkeys((*MLA, *DENSE, *EXPERTS), Format.FP8)
"""zai-org/GLM-5.3-Flash: the indexer stays bf16, as KDA, router, head and kv_b_proj do."""

QUARK_CHECKPOINT = {
    **dict.fromkeys((*MLA, *INDEXER, *DENSE), Format.FP8),
    **dict.fromkeys(EXPERTS, Format.MXFP4),
}
"""amd/GLM-5.3-Flash-Quark-MXFP4."""

STORE = {
    Format.FP8: (fp8.matrix, fp8.quantised, fp8.dequantised),
    Format.MXFP4: (mxfp4.matrix, mxfp4.quantised, mxfp4.dequantised),
}


def kind_of(name: str, weights: ModelWeights[Tensor]) -> str:
    """What a matrix is, as the tables above call it: its name within its layer, or `kda.` or `dense.` before it."""
    parts = name.split(".")
    if parts[0] != "layers":
        return name
    layer, index = weights.layers[int(parts[1])], int(parts[1])
    inner = ".".join(parts[2:])
    if inner.startswith("attention") and not isinstance(layer.attention, MlaWeights):
        return inner.replace("attention", "kda")
    dense = not hasattr(weights.layers[index].ffn, "router")
    return inner.replace("ffn", "dense") if dense else inner


def stored_as(model: Model, formats: Mapping[str, Format]) -> Model:
    """The model with matrices of the named kinds quantised; what they stand for is the reference's."""
    packed: dict[str, tuple[Tensor, Tensor]] = {}

    def pack(name: str, tensor: Tensor) -> Matrix:
        kind = formats.get(kind_of(name, model.weights), Format.BF16)
        if kind == Format.BF16:
            return bf16.matrix(name, tensor)
        describe, quantise, _ = STORE[kind]
        packed[name] = quantise(tensor)
        return describe(name, *packed[name])

    def unpack(name: str, tensor: Tensor) -> Tensor:
        if name not in packed:
            return tensor
        _, _, dequantise = STORE[formats[kind_of(name, model.weights)]]
        return dequantise(*packed[name])

    stored = with_matrices(model.weights, pack)
    return Model(model.geometry, with_matrices(model.weights, unpack), stored)
