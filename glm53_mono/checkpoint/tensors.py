"""Every tensor of a checkpoint in one table: its name, shape, dtype, and how its synthetic values are distributed.

Names and dtypes are those of the published checkpoint (zai-org/GLM-5.3-Flash-BF16) and what SGLang's
`Glm5NextForConditionalGeneration.load_weights` (models/glm5_next.py:1680) takes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from glm53_mono.checkpoint.config import ConfigError, checkpoint_geometry
from glm53_mono.checkpoint.formats import PREFIX, WeightFormat, format_of, scales_name
from glm53_mono.geometry import FP8_BLOCK, MXFP4_BLOCK, Geometry

ITEM_BYTES = {"bfloat16": 2, "float32": 4, "float8_e4m3fn": 1, "uint8": 1}
"""Bytes of one element, by the dtype names of torch that the table uses."""


@dataclass(frozen=True)
class Quantised:
    """A bf16 matrix that is drawn, then quantised; either tensor is drawn from the same values."""

    source: TensorSpec
    weight_format: WeightFormat
    is_scales: bool


@dataclass(frozen=True)
class TensorSpec:
    """One tensor; its synthetic values are drawn from a normal distribution of this mean and standard deviation."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    mean: float
    std: float
    quantised: Quantised | None = None
    """Where the values come from instead, of a quantised matrix or its scales."""

    @property
    def bytes(self) -> int:
        """Size of the data in bytes."""
        return prod(self.shape) * ITEM_BYTES[self.dtype]


def tensor_table(config: dict[str, Any]) -> list[TensorSpec]:
    """The tensors of a checkpoint in the order they are written.

    Args:
        config: the contents of config.json, as `checkpoint.config.model_config` gives them; the MTP layer is listed
            when `num_nextn_predict_layers` is 1. Vision tensors are not: see `model_config`.

    Raises:
        glm53_mono.geometry.GeometryError: a config that the model cannot have.
    """
    geometry = checkpoint_geometry(config)
    layers = [tensor for layer in range(geometry.layers) for tensor in _decoder_layer(geometry, layer)]
    mtp = list(_mtp_layer(geometry)) if config["text_config"]["num_nextn_predict_layers"] else []
    plain = [
        _tensor(PREFIX + "embed_tokens.weight", (geometry.vocab, geometry.hidden), std=1.0),
        *layers,
        *mtp,
        _norm(PREFIX + "norm.weight", geometry.hidden),
        _linear("lm_head.weight", geometry.vocab, geometry.hidden),
    ]
    return [spec for tensor in plain for spec in _as_stored(tensor, config["text_config"])]


def _as_stored(tensor: TensorSpec, text: dict[str, Any]) -> list[TensorSpec]:
    """The tensor itself, or the values and scales that stand for it."""
    stored_as = format_of(tensor.name, text)
    if stored_as == WeightFormat.BF16:
        return [tensor]
    rows, columns = tensor.shape
    if stored_as == WeightFormat.FP8:
        units, values, scales = (FP8_BLOCK, FP8_BLOCK), ((rows, columns), "float8_e4m3fn"), "float32"
    else:
        units, values, scales = (1, MXFP4_BLOCK), ((rows, columns // 2), "uint8"), "uint8"
    if rows % units[0] or columns % units[1]:
        raise ConfigError(f"{tensor.name} is {rows} x {columns}, which is no whole number of {stored_as} blocks")
    blocks = (rows // units[0], columns // units[1])
    return [
        replace(tensor, shape=values[0], dtype=values[1], quantised=Quantised(tensor, stored_as, is_scales=False)),
        replace(
            tensor,
            name=scales_name(tensor.name, text),
            shape=blocks,
            dtype=scales,
            quantised=Quantised(tensor, stored_as, is_scales=True),
        ),
    ]


def _tensor(name: str, shape: tuple[int, ...], *, mean: float = 0.0, std: float, dtype: str = "bfloat16") -> TensorSpec:
    return TensorSpec(name, shape, dtype, mean, std)


def _linear(name: str, rows: int, columns: int) -> TensorSpec:
    """A projection that keeps the size of its input: unit inputs give unit outputs."""
    return _tensor(name, (rows, columns), std=columns**-0.5)


def _norm(name: str, width: int) -> TensorSpec:
    return _tensor(name, (width,), mean=1.0, std=0.1)


def _decoder_layer(geometry: Geometry, layer: int) -> Iterator[TensorSpec]:
    prefix = f"{PREFIX}layers.{layer}."
    yield from _hyper_connections(prefix, geometry)
    yield from _layer_norms(prefix, geometry)
    if geometry.is_kda(layer):
        yield from _kda(prefix + "self_attn.", geometry)
    else:
        yield from _mla(prefix + "self_attn.", geometry)
    if geometry.is_dense(layer):
        yield from _mlp(prefix + "mlp.", geometry.hidden, geometry.dense_width)
    else:
        yield from _experts(prefix + "mlp.", geometry)


def _mtp_layer(geometry: Geometry) -> Iterator[TensorSpec]:
    """The draft's layer: one residual stream, MLA and experts; embedding and head are the model's own."""
    prefix = f"{PREFIX}layers.{geometry.layers}."
    yield _linear(prefix + "eh_proj.weight", geometry.hidden, 2 * geometry.hidden)
    yield _norm(prefix + "enorm.weight", geometry.hidden)
    yield _norm(prefix + "hnorm.weight", geometry.hidden)
    yield _norm(prefix + "shared_head.norm.weight", geometry.hidden)
    yield from _layer_norms(prefix, geometry)
    yield from _mla(prefix + "self_attn.", geometry)
    yield from _experts(prefix + "mlp.", geometry)


def _hyper_connections(prefix: str, geometry: Geometry) -> Iterator[TensorSpec]:
    for branch in ("attn", "ffn"):
        yield _linear(f"{prefix}hc_{branch}_fn", geometry.mix, geometry.stream_width)
        yield _tensor(f"{prefix}hc_{branch}_base", (geometry.mix,), std=0.5, dtype="float32")
        # One factor each for pre, post and comb.
        yield _tensor(f"{prefix}hc_{branch}_scale", (3,), mean=1.0, std=0.2, dtype="float32")


def _layer_norms(prefix: str, geometry: Geometry) -> Iterator[TensorSpec]:
    yield _norm(prefix + "input_layernorm.weight", geometry.hidden)
    yield _norm(prefix + "post_attention_layernorm.weight", geometry.hidden)


def _kda(prefix: str, geometry: Geometry) -> Iterator[TensorSpec]:
    hidden, width, head_dim = geometry.hidden, geometry.kda_width, geometry.kda_head_dim
    for part in "qkv":
        yield _linear(f"{prefix}{part}_proj.weight", width, hidden)
        yield _tensor(f"{prefix}{part}_conv1d.weight", (width, 1, geometry.conv_taps), std=geometry.conv_taps**-0.5)
    yield _linear(prefix + "b_proj.weight", geometry.kda_heads, hidden)
    for gate in "fg":
        yield _linear(f"{prefix}{gate}_a_proj.weight", head_dim, hidden)
        yield _linear(f"{prefix}{gate}_b_proj.weight", width, head_dim)
    # Decay rates exp(A_log) around 1 and a negative dt_bias: states that neither freeze nor vanish within a few tokens.
    yield _tensor(prefix + "A_log", (geometry.kda_heads,), std=0.4, dtype="float32")
    yield _tensor(prefix + "dt_bias", (width,), mean=-1.0, std=0.5, dtype="float32")
    yield _norm(prefix + "o_norm.weight", head_dim)
    yield _linear(prefix + "o_proj.weight", hidden, width)


def _mla(prefix: str, geometry: Geometry) -> Iterator[TensorSpec]:
    heads, hidden, latent = geometry.mla_heads, geometry.hidden, geometry.latent
    yield _linear(prefix + "q_a_proj.weight", geometry.q_rank, hidden)
    yield _norm(prefix + "q_a_layernorm.weight", geometry.q_rank)
    yield _linear(prefix + "q_b_proj.weight", heads * geometry.qk_head_dim, geometry.q_rank)
    yield _linear(prefix + "kv_a_proj_with_mqa.weight", latent, hidden)
    yield _norm(prefix + "kv_a_layernorm.weight", latent)
    yield _linear(prefix + "kv_b_proj.weight", heads * (geometry.qk_head_dim + geometry.v_head_dim), latent)
    yield _linear(prefix + "o_proj.weight", hidden, heads * geometry.v_head_dim)
    yield from _indexer(prefix + "indexer.", geometry)


def _indexer(prefix: str, geometry: Geometry) -> Iterator[TensorSpec]:
    hidden, width = geometry.hidden, geometry.index_head_dim
    yield _linear(prefix + "wq_b.weight", geometry.index_heads * width, geometry.q_rank)
    yield _linear(prefix + "wk.weight", width, hidden)
    yield _norm(prefix + "k_norm.weight", width)
    yield _tensor(prefix + "k_norm.bias", (width,), std=0.1)
    yield _linear(prefix + "weights_proj.weight", geometry.index_heads, hidden)
    yield _tensor(prefix + "index_kpool_compress_ape", (geometry.pool, width), std=0.5)
    yield _linear(prefix + "index_kpool_compress_gate", width, hidden)


def _mlp(prefix: str, hidden: int, width: int) -> Iterator[TensorSpec]:
    yield _linear(prefix + "gate_proj.weight", width, hidden)
    yield _linear(prefix + "up_proj.weight", width, hidden)
    yield _linear(prefix + "down_proj.weight", hidden, width)


def _experts(prefix: str, geometry: Geometry) -> Iterator[TensorSpec]:
    yield _linear(prefix + "gate.weight", geometry.experts, geometry.hidden)
    yield _tensor(prefix + "gate.e_score_correction_bias", (geometry.experts,), std=0.2, dtype="float32")
    yield from _mlp(prefix + "shared_experts.", geometry.hidden, geometry.expert_width)
    for expert in range(geometry.experts):
        yield from _mlp(f"{prefix}experts.{expert}.", geometry.hidden, geometry.expert_width)
