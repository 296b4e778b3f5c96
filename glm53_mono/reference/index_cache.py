"""Where a pooled key lies in the index cache, for both of SGLang's layouts.

A page holds the FP8 keys of `page_pools` pools, then one fp32 scale a pool. CUDA stores keys row after row; ROCm stores
them in tiles of 16 pools x 16 channels (`_kpool_cache_k_offsets`, kpool_fp8_index.py:29-56).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from glm53_mono.geometry import Geometry

KeyLayout = Literal["linear", "tiled"]

TILE = 16
"""Pools and channels of one tile of the ROCm layout (srt/layers/attention/dsa/utils.py:152)."""

SCALE_BYTES = 4


def key_offsets(entry: Tensor, geometry: Geometry, layout: KeyLayout) -> Tensor:
    """Byte offsets inside a page of the channels of pool `entry`.

    Args:
        entry: [...] i64, the pool's place in its page.
        geometry: sizes of one rank.
        layout: of the keys.

    Returns:
        [..., index_head_dim] i64.

    Raises:
        ValueError: the layout is neither `linear` nor `tiled`.
    """
    width = geometry.index_head_dim
    channel = torch.arange(width, device=entry.device)
    entry = entry[..., None]
    if layout == "linear":
        return entry * width + channel
    if layout == "tiled":
        tile_row = entry // TILE * (TILE * width) + entry % TILE * TILE
        return tile_row + channel // TILE * (TILE * TILE) + channel % TILE
    raise ValueError(f"index key layout {layout!r} is neither 'linear' nor 'tiled'")


def scale_offsets(entry: Tensor, geometry: Geometry) -> Tensor:
    """Byte offsets inside a page of the four bytes of a pool's scale, [..., 4] i64 (kpool_fp8_index.py:1401-1405)."""
    byte = torch.arange(SCALE_BYTES, device=entry.device)
    return geometry.page_pools * geometry.index_head_dim + entry[..., None] * SCALE_BYTES + byte


def locate(pools: Tensor, token_slots: Tensor, geometry: Geometry) -> tuple[Tensor, Tensor]:
    """Page and entry of pools: the page of a pool is the KV page of its tokens (kpool_fp8_index.py:374-402).

    Args:
        pools: [...] i64, pool numbers of a request.
        token_slots: [..., longest context] integer, the request's row of `req_to_token`, broadcast against `pools`.
        geometry: sizes of one rank.

    Returns:
        pages and entries, each [...] i64.
    """
    first_token = pools // geometry.page_pools * geometry.page_tokens
    slots = torch.gather(token_slots, -1, first_token.clamp(max=token_slots.shape[-1] - 1))
    return slots.long() // geometry.page_tokens, pools % geometry.page_pools


def write(
    cache: Tensor, pages: Tensor, entries: Tensor, keys: Tensor, scales: Tensor, geometry: Geometry, layout: KeyLayout
) -> None:
    """Store pooled keys.

    Args:
        cache: [pages, index_page_bytes] uint8, changed in place.
        pages: [n] i64.
        entries: [n] i64.
        keys: [n, index_head_dim] float8_e4m3fn.
        scales: [n] fp32.
        geometry: sizes of one rank.
        layout: of the keys.
    """
    cache[pages[:, None], key_offsets(entries, geometry, layout)] = keys.view(torch.uint8)
    cache[pages[:, None], scale_offsets(entries, geometry)] = (
        scales.contiguous().view(torch.uint8).view(-1, SCALE_BYTES)
    )


def read(cache: Tensor, pages: Tensor, entries: Tensor, geometry: Geometry, layout: KeyLayout) -> tuple[Tensor, Tensor]:
    """Load pooled keys.

    Args:
        cache: [pages, index_page_bytes] uint8.
        pages: [n] i64.
        entries: [n] i64.
        geometry: sizes of one rank.
        layout: of the keys.

    Returns:
        keys [n, index_head_dim] float8_e4m3fn and scales [n] fp32.
    """
    keys = cache[pages[:, None], key_offsets(entries, geometry, layout)].view(torch.float8_e4m3fn)
    scales = cache[pages[:, None], scale_offsets(entries, geometry)].contiguous().view(torch.float32).squeeze(-1)
    return keys, scales
