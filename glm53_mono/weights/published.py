"""How the published checkpoints store each kind of matrix, and how SGLang then holds it where AITER lays it out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any

from glm53_mono.geometry import Geometry
from glm53_mono.weights.descriptor import Format, Layout, Storage
from glm53_mono.weights.formats import Formats, kinds
from glm53_mono.weights.model import LayerWeights, with_matrices

_BLOCKS = Storage(Format.FP8)
_MXFP4 = Storage(Format.MXFP4)

FP8_CHECKPOINT = Formats(
    latents=_BLOCKS,
    query=_BLOCKS,
    attention_output=_BLOCKS,
    dense_up=_BLOCKS,
    dense_down=_BLOCKS,
    shared_up=_BLOCKS,
    experts_up=_BLOCKS,
    down=_BLOCKS,
)
"""zai-org/GLM-5.3-Flash: the indexer is bf16, as KDA, router, head and kv_b_proj are."""

QUARK_CHECKPOINT = replace(
    FP8_CHECKPOINT, index_key=_BLOCKS, index_query=_BLOCKS, shared_up=_MXFP4, experts_up=_MXFP4, down=_MXFP4
)
"""amd/GLM-5.3-Flash-Quark-MXFP4."""

CHECKPOINTS: Mapping[str, Formats] = {"bf16": Formats(), "fp8": FP8_CHECKPOINT, "mxfp4": QUARK_CHECKPOINT}
"""By the name of a checkpoint's format."""

BY_QUANTIZATION: Mapping[str | None, Formats] = {None: Formats(), "fp8": FP8_CHECKPOINT, "quark": QUARK_CHECKPOINT}
"""By SGLang's name of a checkpoint's quantisation."""

LEFT_BY_AITER = (16384, 1536)
"""Rows and columns of the one FP8 matrix of this model, the query's at TP 1, that SGLang leaves in row-major order: it
has a Triton product for it (fp8_utils.py:319, use_aiter_triton_gemm_w8a8_tuned_gfx950)."""


def held_by_aiter(formats: Formats, geometry: Geometry, *, shared_fused: bool) -> Formats:
    """A checkpoint's formats with the layouts of a server on gfx950 with ROCm 7.2 and SGLANG_USE_AITER=1.

    Args:
        formats: linear ones.
        geometry: of the rank.
        shared_fused: whether the shared expert is a row of the routed ones; its MXFP4 matrices stay row-major where it
            is not (quark_w4a4_mxfp4.py: process_weights_after_loading), and `copies` brings its down matrix into the
            order of the others.
    """
    shuffled = {
        field.name: replace(storage, layout=Layout.SHUFFLED)
        for field in fields(formats)
        if (storage := getattr(formats, field.name)).format != Format.BF16
    }
    if (geometry.mla_heads * geometry.qk_head_dim, geometry.q_rank) == LEFT_BY_AITER:
        shuffled.pop("query", None)
    if formats.shared_up.format == Format.MXFP4 and not shared_fused:
        del shuffled["shared_up"]
    return replace(formats, **shuffled)


def with_storage(weights: Any, formats: Formats, change: Callable[[str, Any, Storage], Any], name: str = "") -> Any:
    """The same weights, each matrix replaced by what `change` makes of its name, itself and how it is to be stored.

    Args:
        weights: a model's or one layer's, tensors or matrices.
        formats: of the layers' matrices.
        change: as described.
        name: of the layer; empty for a whole model.
    """
    layers = (weights,) if isinstance(weights, LayerWeights) else weights.layers
    named = {id(matrix): kind for layer in layers for kind, matrix in kinds(layer)}
    return with_matrices(
        weights, lambda own, matrix: change(own, matrix, getattr(formats, named.get(id(matrix), "plain"))), name
    )
