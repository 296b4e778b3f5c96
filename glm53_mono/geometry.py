"""The one place where sizes are derived: the HF config and the TP size give every size of a rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

ARCHITECTURE = "Glm5NextForConditionalGeneration"
"""The HF architecture whose steps we run."""

FP8_BLOCK = 128
"""Rows and columns that share one scale in an FP8 weight."""

MXFP4_BLOCK = 32
"""Columns of a row that share one scale in an MXFP4 weight."""

MAX_ROWS = 8
"""Rows of the largest step that runs as one launch."""

TP_SIZES = (1, 2, 4, 8)
"""Ranks that may share the model."""

MOST_LAYERS, MOST_EXPERTS = 1024, 4096
"""Far beyond any such model: lists as long as a mistyped number would fill the memory before anything is refused."""

VOCAB_PADDING = 64
"""SGLang pads the vocabulary to a multiple of this before it shards it (vocab_parallel_embedding.py:48)."""

STRUCTURE: Mapping[str, Any] = {
    "mhc": True,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "swiglu_limit": 10.0,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "qk_nope_head_dim": 256,
    "qk_rope_head_dim": 0,
    "v_head_dim": 256,
    "index_head_dim": 128,
    "index_kpool": 4,
    "index_kpool_compress": True,
    "index_kpool_always_select_tail": True,
    "index_topk_freq": 1,
    "index_topk_pattern": None,
    "index_skip_topk_offset": None,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
}
"""Config fields that are built into the kernels, with the only value each may have."""

LINEAR_STRUCTURE: Mapping[str, Any] = {
    "head_dim": 128,
    "short_conv_kernel_size": 4,
    "gate_lower_bound": -5.0,
}
"""The same for the fields of `linear_attn_config`."""


class GeometryError(ValueError):
    """A config that the step cannot represent; the message names the field and both values."""


@dataclass(frozen=True)
class Geometry:
    """Sizes of one rank's share of the model; tokens and tensors are counted in elements unless a name says bytes."""

    tp_size: int
    layers: int
    hidden: int
    vocab: int
    kda_layers: tuple[int, ...]
    dsa_layers: tuple[int, ...]
    dense_layers: int
    kda_heads: int
    mla_heads: int
    q_rank: int
    latent: int
    index_heads: int
    index_topk: int
    experts: int
    experts_per_token: int
    routed_scale: float
    expert_width: int
    dense_width: int

    streams: int = STRUCTURE["hc_mult"]
    sinkhorn_iterations: int = STRUCTURE["hc_sinkhorn_iters"]
    hc_eps: float = STRUCTURE["hc_eps"]
    post_multiplier: float = 2.0
    rms_eps: float = STRUCTURE["rms_norm_eps"]
    layer_norm_eps: float = 1e-6
    swiglu_limit: float = STRUCTURE["swiglu_limit"]
    kda_head_dim: int = LINEAR_STRUCTURE["head_dim"]
    conv_taps: int = LINEAR_STRUCTURE["short_conv_kernel_size"]
    gate_lower_bound: float = LINEAR_STRUCTURE["gate_lower_bound"]
    l2_eps: float = 1e-6
    renormalise_eps: float = 1e-20
    """Added to the sum of a row's chosen scores (`_RENORMALIZE_SUM_EPSILON`, srt/layers/moe/topk.py)."""
    qk_head_dim: int = STRUCTURE["qk_nope_head_dim"]
    v_head_dim: int = STRUCTURE["v_head_dim"]
    index_head_dim: int = STRUCTURE["index_head_dim"]
    pool: int = STRUCTURE["index_kpool"]
    page_tokens: int = 256
    """Tokens of one page of the KV allocator: 64 pools (deepseek_v2.py overrides :169-172)."""

    @classmethod
    def from_config(cls, config: Any, tp_size: int) -> Geometry:
        """Derive the sizes of one rank.

        Args:
            config: SGLang's `Glm5NextConfig` (its text fields are read from `text_config`) or its text config.
            tp_size: ranks that share the model, 1, 2, 4 or 8.

        Raises:
            GeometryError: one line for every field that the step cannot represent.
        """
        text = getattr(config, "text_config", None) or config
        reasons = _structure_reasons(text)
        if tp_size not in TP_SIZES:
            reasons.append(f"tp_size {tp_size!r} is not one of {', '.join(map(str, TP_SIZES))}")
        sizes = _Sizes(text, tp_size if tp_size in TP_SIZES else 1, reasons)
        linear = _linear(text)
        layers = sizes.whole("num_hidden_layers", most=MOST_LAYERS)
        kda = sizes.layer_list("kda_layers", linear) or ()
        dsa = tuple(i for i in range(layers) if i not in kda)
        counted = "num_hidden_layers" not in sizes.refused
        if counted and kda and (kda[-1] >= layers or kda[0] < 0):
            reasons.append(f"linear_attn_config.kda_layers {list(kda)} names layers outside 0..{layers - 1}")
        listed = sizes.layer_list("full_attn_layers", linear)
        if counted and not sizes.refused & {"kda_layers", "full_attn_layers"} and listed not in (None, dsa):
            found = f"linear_attn_config.full_attn_layers {list(listed)}"
            reasons.append(f"{found} is not the rest of the layers {list(dsa)}")
        geometry = cls(
            tp_size=tp_size,
            layers=layers,
            hidden=sizes.whole("hidden_size", multiple=128),
            vocab=sizes.whole("vocab_size"),
            kda_layers=kda,
            dsa_layers=dsa,
            dense_layers=min(sizes.whole("first_k_dense_replace", least=0), layers),
            kda_heads=sizes.shard("linear_attn_config.num_heads", linear.get("num_heads")),
            mla_heads=sizes.shard("num_attention_heads", _field(text, "num_attention_heads")),
            q_rank=sizes.whole("q_lora_rank", multiple=32),
            latent=sizes.whole("kv_lora_rank", multiple=128),
            index_heads=sizes.whole("index_n_heads"),
            index_topk=sizes.whole("index_topk", multiple=STRUCTURE["index_kpool"]),
            experts=sizes.whole("n_routed_experts", most=MOST_EXPERTS),
            experts_per_token=sizes.whole("num_experts_per_tok"),
            routed_scale=_field(text, "routed_scaling_factor"),
            expert_width=sizes.shard("moe_intermediate_size", _field(text, "moe_intermediate_size"), multiple=32),
            dense_width=sizes.shard("intermediate_size", _field(text, "intermediate_size"), multiple=32),
        )
        if not sizes.refused & {"num_hidden_layers", "first_k_dense_replace"}:
            reasons += _ffn_reasons(_field(text, "mlp_layer_types"), geometry)
        if geometry.experts_per_token > geometry.experts and "n_routed_experts" not in sizes.refused:
            found = f"num_experts_per_tok {geometry.experts_per_token}"
            reasons.append(f"{found} is more than n_routed_experts {geometry.experts}")
        if not isinstance(geometry.routed_scale, int | float) or not geometry.routed_scale > 0:
            reasons.append(f"routed_scaling_factor {geometry.routed_scale!r} is not a positive number")
        if reasons:
            raise GeometryError("; ".join(reasons))
        return geometry

    def is_kda(self, layer: int) -> bool:
        """Whether the layer's attention is KDA (else MLA with the sparse indexer)."""
        return layer in self.kda_layers

    def is_dense(self, layer: int) -> bool:
        """Whether the layer's FFN is dense (else routed experts and a shared one)."""
        return layer < self.dense_layers

    @property
    def stream_width(self) -> int:
        """Values of one row's streams side by side."""
        return self.streams * self.hidden

    @property
    def mix(self) -> int:
        """Rows of an mHC `fn` matrix: pre, post and the square comb."""
        return (2 + self.streams) * self.streams

    @property
    def kda_width(self) -> int:
        """P: this rank's q, k or v columns."""
        return self.kda_heads * self.kda_head_dim

    @property
    def conv_channels(self) -> int:
        """q, k and v channels of the causal convolution."""
        return 3 * self.kda_width

    @property
    def conv_history(self) -> int:
        """Inputs a convolution window keeps."""
        return self.conv_taps - 1

    @property
    def selected_pools(self) -> int:
        """Pools a row attends at most."""
        return self.index_topk // self.pool

    @property
    def selection_width(self) -> int:
        """Tokens a row attends at most: the selected pools and the tail of an unfinished one."""
        return self.index_topk + self.pool - 1

    @property
    def page_pools(self) -> int:
        """Pools of one page."""
        return self.page_tokens // self.pool

    @property
    def index_page_bytes(self) -> int:
        """Bytes of one page of the index cache: the pools' FP8 keys, then one fp32 scale a pool."""
        return self.page_pools * (self.index_head_dim + 4)

    @property
    def vocab_shard(self) -> int:
        """Rows of the embedding that this rank holds, padding included."""
        padded = -(-self.vocab // VOCAB_PADDING) * VOCAB_PADDING
        return padded // self.tp_size

    def owned_tokens(self, rank: int) -> tuple[int, int]:
        """The first token whose embedding row a rank holds, and the one behind the last; a rank may hold none."""
        first = rank * self.vocab_shard
        return min(first, self.vocab), min(first + self.vocab_shard, self.vocab)


def _field(text: Any, name: str) -> Any:
    return getattr(text, name, None)


def _linear(text: Any) -> Mapping[str, Any]:
    """`linear_attn_config`, empty where it is missing or no mapping."""
    found = _field(text, "linear_attn_config")
    return found if isinstance(found, Mapping) else {}


def _structure_reasons(text: Any) -> list[str]:
    reasons = [
        f"{name} {_field(text, name)!r} is not {want!r}"
        for name, want in STRUCTURE.items()
        if not _same(_field(text, name), want)
    ]
    linear = _linear(text)
    if not linear:
        found = _field(text, "linear_attn_config")
        return [*reasons, f"linear_attn_config {found!r} does not describe the KDA layers"]
    reasons += [
        f"linear_attn_config.{name} {linear.get(name)!r} is not {want!r}"
        for name, want in LINEAR_STRUCTURE.items()
        if not _same(linear.get(name), want)
    ]
    kinds = _field(text, "indexer_types")
    if kinds and not isinstance(kinds, list | tuple):
        reasons.append(f"indexer_types {kinds!r} is not a list")
    elif kinds and any(kind != "full" for kind in kinds):
        odd = sorted({str(kind) for kind in kinds if kind != "full"})
        reasons.append(f"indexer_types has {', '.join(odd)}, where every DSA layer must run its own indexer ('full')")
    scaling = _field(text, "rope_scaling")
    if scaling and "mrope_section" in scaling:
        reasons.append(f"rope_scaling.mrope_section {scaling['mrope_section']!r} is not None")
    return reasons


def _ffn_reasons(kinds: Any, geometry: Geometry) -> list[str]:
    """What is wrong with `mlp_layer_types`, which says again what `first_k_dense_replace` says; it may be missing."""
    if kinds is None:
        return []
    if not isinstance(kinds, list | tuple):
        return [f"mlp_layer_types {kinds!r} is not a list"]
    want = ["dense" if geometry.is_dense(layer) else "sparse" for layer in range(geometry.layers)]
    if len(kinds) < len(want):
        return [f"mlp_layer_types has {len(kinds)} layers, num_hidden_layers is {len(want)}"]
    for layer, (found, wanted) in enumerate(zip(kinds, want, strict=False)):
        if found != wanted:
            said = f"first_k_dense_replace {geometry.dense_layers} makes it {wanted!r}"
            return [f"mlp_layer_types has {found!r} for layer {layer}, and {said}"]
    return []


def _same(found: Any, want: Any) -> bool:
    """Equality that neither takes 1 for True nor None for a missing field with another default."""
    return found == want and isinstance(found, bool) == isinstance(want, bool)


@dataclass
class _Sizes:
    """Reads sizes of a config and collects what is wrong with them."""

    text: Any
    tp_size: int
    reasons: list[str]
    refused: set[str] = field(default_factory=set)
    """Names of the sizes that are wrong; what stands in for them means nothing."""

    def whole(self, name: str, *, multiple: int = 1, least: int = 1, most: int | None = None) -> int:
        value = self._checked(name, _field(self.text, name), multiple, least)
        if most is None or value <= most:
            return value
        self.reasons.append(f"{name} {value} is more than {most}")
        self.refused.add(name)
        return least

    def layer_list(self, name: str, linear: Mapping[str, Any]) -> tuple[int, ...] | None:
        """Ascending layer numbers of a field of `linear_attn_config`; None where it is missing or refused."""
        listed = linear.get(name)
        if listed is None:
            return None
        if not isinstance(listed, list | tuple) or any(type(layer) is not int for layer in listed):
            self.reasons.append(f"linear_attn_config.{name} {listed!r} is not a list of layer numbers")
            self.refused.add(name)
            return None
        return tuple(sorted(set(listed)))

    def shard(self, name: str, total: Any, *, multiple: int = 1) -> int:
        return self._checked(name, total, multiple * self.tp_size, 1) // self.tp_size

    def _checked(self, name: str, value: Any, multiple: int, least: int) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            self.reasons.append(f"{name} {value!r} is not a whole number of at least {least}")
            self.refused.add(name)
            return multiple
        if value % multiple:
            at_tp = f" at tp_size {self.tp_size}" if self.tp_size > 1 else ""
            self.reasons.append(f"{name} {value} is not a multiple of {multiple}{at_tp}")
            self.refused.add(name)
            return multiple
        return value
