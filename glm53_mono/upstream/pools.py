"""The caches of one layer, as tensors with checked layouts.

SGLang allocates each cache once for all layers; what is returned here are views of one layer, whose addresses stay as
they are until the server ends. Slots of the KDA state may lie apart: read `stride(0)`. Index them by: KDA state, the
slot in `StepBindings.state_slots`; verify scratch, its `scratch_rows`; latent, the token's slot; index keys,
slot // 256; ring, `request_rows` and position % width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from glm53_mono.geometry import Geometry
from glm53_mono.upstream.step import Backends
from glm53_mono.upstream.tensors import UpstreamError, expect

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class KdaCache:
    """State of one KDA layer; H heads of this rank, C = 3P convolution channels.

    Attributes:
        conv: [slots, 3, C] bf16, the last three inputs of the convolution, oldest first.
        temporal: [slots, H, V, K] fp32.
        intermediate_ssm: [rows, draft tokens, H, V, K] fp32, the state after each draft token; None without MTP.
        intermediate_conv: [rows, draft tokens, 3, C] bf16, the window after each draft token; None without MTP.
    """

    conv: torch.Tensor
    temporal: torch.Tensor
    intermediate_ssm: torch.Tensor | None
    intermediate_conv: torch.Tensor | None


@dataclass(frozen=True)
class CompressRing:
    """Keys of the pools that are not closed yet; width = pool + draft tokens, both tensors [request rows, width, 128].

    Attributes:
        keys: bf16, normalised indexer keys, not rotated.
        scores: bf16, gate logits without the position term.
    """

    keys: torch.Tensor
    scores: torch.Tensor


def kda_layer_cache(backends: Backends, layer: int, geometry: Geometry) -> KdaCache:
    """The state of a KDA layer (memory_pool.py: MambaPool.State, MambaPool.SpeculativeState).

    Raises:
        UpstreamError: a tensor of another shape, dtype or stride, or a verify scratch without states (ReplaySSM).
    """
    import torch

    if hasattr(backends.linear, "state_layer_cache"):
        state = backends.linear.state_layer_cache(layer)
    else:
        state = backends.request_pool.mamba2_layer_cache(layer)
    window = (geometry.conv_history, geometry.conv_channels)
    matrix = (geometry.kda_heads, geometry.kda_head_dim, geometry.kda_head_dim)
    conv = expect(state.conv[0], f"conv state of layer {layer}", (None, *window), torch.bfloat16, any_outer_stride=True)
    temporal = expect(
        state.temporal, f"recurrent state of layer {layer}", (None, *matrix), torch.float32, any_outer_stride=True
    )
    if not hasattr(state, "intermediate_ssm"):
        return KdaCache(conv, temporal, None, None)
    if state.intermediate_ssm is None:
        raise UpstreamError(f"layer {layer} has no verify scratch of states: ReplaySSM is on")
    ssm_scratch = expect(
        state.intermediate_ssm, f"verify states of layer {layer}", (None, None, *matrix), torch.float32
    )
    conv_scratch = expect(
        state.intermediate_conv_window[0],
        f"verify conv windows of layer {layer}",
        (ssm_scratch.shape[0], ssm_scratch.shape[1], *window),
        torch.bfloat16,
    )
    return KdaCache(conv, temporal, ssm_scratch, conv_scratch)


def latent_pool(backends: Backends, layer: int, geometry: Geometry) -> torch.Tensor:
    """The latent cache of a DSA layer: [slots, latent] bf16 (memory_pool.py: MLATokenToKVPool._create_buffers).

    Raises:
        UpstreamError: another shape, dtype or page size.
    """
    import torch

    pool, ordinal = _sparse_pool(backends, layer)
    if pool.page_size != geometry.page_tokens:
        raise UpstreamError(f"DSATokenToKVPool.page_size is {pool.page_size}, not {geometry.page_tokens}")
    cache = expect(
        pool.kv_buffer[ordinal], f"latent cache of layer {layer}", (None, 1, geometry.latent), torch.bfloat16
    )
    return cache.squeeze(1)


def index_pool(backends: Backends, layer: int, geometry: Geometry) -> torch.Tensor:
    """The index keys of a DSA layer: [pages, 8448] uint8 (index_key_cache.py: IndexKeyCache).

    A page holds the FP8 keys of its 64 pools, then one fp32 scale a pool.

    Raises:
        UpstreamError: another shape or dtype.
    """
    import torch

    pool, ordinal = _sparse_pool(backends, layer)
    pages = pool.index_k_with_scale_buffer[ordinal]
    return expect(pages, f"index keys of layer {layer}", (None, geometry.index_page_bytes), torch.uint8)


def compress_ring(backends: Backends, layer: int, geometry: Geometry) -> CompressRing:
    """The ring of unfinished pools of a DSA layer (memory_pool.py: DSATokenToKVPool.get_compress_tail_buffers).

    Raises:
        UpstreamError: another shape or dtype, or an index cache that does not pool keys.
    """
    import torch

    pool, ordinal = _sparse_pool(backends, layer)
    if not pool.kpool_use_compress:
        raise UpstreamError(f"the index cache of layer {layer} does not pool keys (index_kpool_compress)")
    keys, scores = pool.get_compress_tail_buffers(ordinal)
    width = keys.shape[1]
    if width < geometry.pool:
        raise UpstreamError(f"the ring of layer {layer} holds {width} tokens, fewer than a pool of {geometry.pool}")
    shape = (None, width, geometry.index_head_dim)
    return CompressRing(
        keys=expect(keys, f"ring keys of layer {layer}", shape, torch.bfloat16),
        scores=expect(scores, f"ring scores of layer {layer}", (keys.shape[0], *shape[1:]), torch.bfloat16),
    )


def _sparse_pool(backends: Backends, layer: int) -> tuple[Any, int]:
    """The pool of all DSA layers, and the layer's place in it."""
    from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool

    pool = backends.token_pool.full_kv_pool
    if not isinstance(pool, DSATokenToKVPool):
        raise UpstreamError(f"HybridLinearKVPool.full_kv_pool is {type(pool).__name__}, not DSATokenToKVPool")
    ordinals = backends.token_pool.full_attention_layer_id_mapping
    if layer not in ordinals:
        raise UpstreamError(f"layer {layer} is not among the DSA layers {sorted(ordinals)} of the pool")
    return pool, ordinals[layer]
