"""All weights of a model by layer part, generic over what a matrix is.

M is a `torch.Tensor` in the reference and a `descriptor.Matrix` for the kernels. Only the matrices that a product
streams are M, [outputs, inputs]; norms, biases and the small fp32 parameters are tensors on both sides. Sizes are those
of one rank, named as in `Geometry`; P = kda_width = kda_heads * kda_head_dim. Dtypes are SGLang's.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Generic, TypeVar

from torch import Tensor

M = TypeVar("M")


@dataclass(frozen=True)
class MhcWeights:
    """One branch's hyper-connection, and the norm between the mixed streams and the branch."""

    fn: Tensor
    """[mix, streams * hidden] fp32."""
    scale: Tensor
    """[3] fp32: of pre, post and comb."""
    base: Tensor
    """[mix] fp32."""
    norm: Tensor
    """[hidden] bf16 (input_layernorm, post_attention_layernorm)."""


@dataclass(frozen=True)
class KdaWeights(Generic[M]):
    """One linear-attention layer."""

    qkv: M
    """[3 * P, hidden]: q, k, v."""
    beta: M
    """[kda_heads, hidden]."""
    decay_down: M
    """[kda_head_dim, hidden] (f_a)."""
    decay_up: M
    """[P, kda_head_dim] (f_b)."""
    gate_down: M
    """[kda_head_dim, hidden] (g_a)."""
    gate_up: M
    """[P, kda_head_dim] (g_b)."""
    taps: Tensor
    """[3 * P, conv_taps] fp32, oldest input first."""
    a_log: Tensor
    """[kda_heads] fp32."""
    dt_bias: Tensor
    """[kda_heads, kda_head_dim] fp32."""
    output_norm: Tensor
    """[kda_head_dim] bf16."""
    output: M
    """[hidden, P]."""


@dataclass(frozen=True)
class IndexerWeights(Generic[M]):
    """The sparse indexer of one MLA layer."""

    query: M
    """[index_heads * index_head_dim, q_rank] (wq_b)."""
    key: M
    """[index_head_dim, hidden] (wk)."""
    key_norm_weight: Tensor
    """[index_head_dim] fp32."""
    key_norm_bias: Tensor
    """[index_head_dim] fp32."""
    head_weights: Tensor
    """[index_heads, hidden] fp32 (weights_proj)."""
    pool_gate: M
    """[index_head_dim, hidden] (index_kpool_compress_gate)."""
    position_bias: Tensor
    """[pool, index_head_dim] fp32, added to the gate by position inside the pool (index_kpool_compress_ape)."""


@dataclass(frozen=True)
class MlaWeights(Generic[M]):
    """One sparse-attention layer."""

    query_latent: M
    """[q_rank + latent, hidden]: q_a_proj, then kv_a_proj_with_mqa."""
    query_norm: Tensor
    """[q_rank] bf16."""
    latent_norm: Tensor
    """[latent] bf16."""
    query: M
    """[mla_heads * qk_head_dim, q_rank] (q_b_proj)."""
    key_up: M
    """[mla_heads, latent, qk_head_dim]: the key rows of kv_b_proj, transposed; absorbed into the query (w_kc)."""
    value_up: M
    """[mla_heads, v_head_dim, latent]: the value rows of kv_b_proj (w_vc)."""
    output: M
    """[hidden, mla_heads * v_head_dim]."""
    indexer: IndexerWeights[M]


@dataclass(frozen=True)
class DenseWeights(Generic[M]):
    """A dense FFN or a shared expert, `width` wide."""

    gate_up: M
    """[2 * width, hidden]: gate, then up."""
    down: M
    """[hidden, width]."""


@dataclass(frozen=True)
class MoeWeights(Generic[M]):
    """Routed experts, and the shared one: a DenseWeights, or fused as row `experts` of the expert matrices."""

    router: M
    """[experts, hidden]."""
    bias: Tensor
    """[experts] fp32, for the choice alone (e_score_correction_bias)."""
    gate_up: M
    """[experts (+ 1 if fused), 2 * expert_width, hidden] (w13_weight)."""
    down: M
    """[experts (+ 1 if fused), hidden, expert_width] (w2_weight)."""
    shared: DenseWeights[M] | None
    """None when the shared expert is fused."""


@dataclass(frozen=True)
class LayerWeights(Generic[M]):
    """One decoder layer."""

    attention_mhc: MhcWeights
    attention: KdaWeights[M] | MlaWeights[M]
    ffn_mhc: MhcWeights
    ffn: DenseWeights[M] | MoeWeights[M]


@dataclass(frozen=True)
class StepWeights(Generic[M]):
    """The text model without its MTP layer and without its head, which a step leaves to SGLang."""

    embedding: M
    """[vocab, hidden], or the rows of the tokens that this rank owns."""
    layers: tuple[LayerWeights[M], ...]
    norm: Tensor
    """[hidden] bf16."""
    first_token: int = field(default=0, kw_only=True)
    """Token of the embedding's first row."""

    @property
    def shared_is_fused(self) -> bool:
        """Whether the shared expert is one more row of the routed experts' matrices."""
        return any(isinstance(layer.ffn, MoeWeights) and layer.ffn.shared is None for layer in self.layers)


@dataclass(frozen=True)
class ModelWeights(StepWeights[M]):
    """The text model with its head."""

    head: M
    """[vocab, hidden] (lm_head)."""


def matrices(weights: Any) -> Iterator[Any]:
    """Every matrix of a record or of a whole model, each where it stands."""
    if isinstance(weights, tuple):
        for item in weights:
            yield from matrices(item)
    elif is_dataclass(weights):
        for field in fields(weights):
            value = getattr(weights, field.name)
            # the annotation itself, not its text: this file does without `from __future__ import annotations`
            if field.type is M:
                yield value
            else:
                yield from matrices(value)


def with_matrices(weights: Any, change: Callable[[str, Any], Any], name: str = "") -> Any:
    """The same record, its matrices replaced.

    Args:
        weights: any of the records above.
        change: gets each matrix's name, as in `layers.3.attention.qkv`, and the matrix; gives what stands in its place.
        name: of the record itself; empty for a whole model.
    """
    prefix = f"{name}." if name else ""
    if isinstance(weights, tuple):
        return tuple(with_matrices(item, change, f"{prefix}{index}") for index, item in enumerate(weights))
    if not is_dataclass(weights):
        return weights
    changed = {}
    for part in fields(weights):
        inner, value = prefix + part.name, getattr(weights, part.name)
        changed[part.name] = change(inner, value) if part.type is M else with_matrices(value, change, inner)
    return type(weights)(**changed)
