"""The regions of SGLang's caches that a step writes, layer by layer: saved, put back, and laid out for comparison."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from glm53_mono.geometry import MAX_ROWS, Geometry
from glm53_mono.kernels.monokernel import StepSizes, StepTensors
from glm53_mono.program.pools import Pools
from glm53_mono.reference import index_cache


class Places(NamedTuple):
    """Where a step writes, int64 indices into the caches' first dimension; 0, which is padding's, where it does not."""

    state: Tensor
    """[requests]"""
    track: Tensor
    """[requests]"""
    scratch: Tensor
    """[requests]"""
    cache: Tensor
    """[rows]"""
    ring: Tensor
    """[requests]"""
    page: Tensor
    """[rows]"""


class Live(NamedTuple):
    """What of a step is not padding, int32."""

    rows: Tensor
    """[rows]"""
    requests: Tensor
    """[requests]"""
    tracked: Tensor
    """[requests], those whose state is saved for the prefix cache in this step"""
    closing: Tensor
    """[rows], those whose token closes a pool"""


@dataclass(frozen=True)
class Region:
    """A cache of one layer as a step writes it.

    Attributes:
        name: of the region; "tracked" ones and their originals lie in one cache at different places.
        cache: [places, ...].
        places: the field of `Places` that says where.
    """

    name: str
    cache: Tensor
    places: str

    def read(self, places: Places) -> Tensor:
        """What the region holds: a copy, [rows or requests, ...]."""
        return self.cache.index_select(0, getattr(places, self.places))

    def write(self, places: Places, saved: Tensor) -> None:
        """Puts back what `read` returned."""
        self.cache.index_copy_(0, getattr(places, self.places), saved)


def places_of(tensors: StepTensors, sizes: StepSizes, geometry: Geometry) -> Places:
    """Where a step writes; device work alone."""
    requests = sizes.rows // sizes.tokens
    tracked = tensors.track_mask[:requests] & (tensors.track_slots[:requests] >= 0)
    cache = tensors.cache_slots[: sizes.rows].clamp(min=0)
    return Places(
        state=tensors.state_slots[:requests].clamp(min=0).long(),
        track=torch.where(tracked, tensors.track_slots[:requests], 0),
        scratch=tensors.scratch_rows[:requests].clamp(min=0).long(),
        cache=cache,
        ring=tensors.request_rows[:requests],
        page=cache // geometry.page_tokens,
    )


def lengths_of(tensors: StepTensors, sizes: StepSizes, *, verify: bool) -> Tensor:
    """[rows] int64, tokens that each row sees, itself included."""
    lengths = a_row(tensors.seq_lens[: sizes.rows // sizes.tokens], sizes)
    if verify:
        lengths = lengths + torch.arange(sizes.rows, device=lengths.device) % sizes.tokens + 1
    return lengths


def a_row(values: Tensor, sizes: StepSizes) -> Tensor:
    """[rows] of [requests]: each request's value in each of its rows."""
    return values[:, None].expand(-1, sizes.tokens).flatten()


def live_of(tensors: StepTensors, sizes: StepSizes, geometry: Geometry, *, verify: bool) -> Live:
    """What of a step is not padding; device work alone."""
    requests = sizes.rows // sizes.tokens
    own = tensors.state_slots[:requests] > 0
    rows = a_row(own, sizes)
    tracked = own & tensors.track_mask[:requests] & (tensors.track_slots[:requests] >= 0)
    closing = rows & (lengths_of(tensors, sizes, verify=verify) % geometry.pool == 0)
    return Live(rows.int(), own.int(), tracked.int(), closing.int())


def layer_regions(pools: Pools, geometry: Geometry, layer: int, *, verify: bool) -> list[Region]:
    """The regions that a step writes in a layer, or that SGLang's own parts may write in it."""
    if layer in geometry.dsa_layers:
        i = geometry.dsa_layers.index(layer)
        return [
            Region("latent", pools.latent[i], "cache"),
            Region("ring keys", pools.ring_key[i], "ring"),
            Region("ring gates", pools.ring_gate[i], "ring"),
            Region("index keys", pools.index[i], "page"),
        ]
    i = geometry.kda_layers.index(layer)
    committed = [Region("window", pools.conv[i], "state"), Region("state", pools.state[i], "state")]
    if not verify:
        return [
            *committed,
            Region("tracked window", pools.conv[i], "track"),
            Region("tracked state", pools.state[i], "track"),
        ]
    assert pools.conv_scratch is not None and pools.state_scratch is not None
    return [
        *committed,
        Region("draft windows", pools.conv_scratch[i], "scratch"),
        Region("draft states", pools.state_scratch[i], "scratch"),
    ]


def bytes_a_layer(geometry: Geometry, layer: int, *, verify: bool) -> int:
    """Bytes of a layer's regions at most, for a step of `MAX_ROWS` rows."""
    if layer in geometry.dsa_layers:
        # a ring is as wide as a pool and the drafts of a request
        ring = (geometry.pool + MAX_ROWS) * geometry.index_head_dim * 2
        return MAX_ROWS * (geometry.latent * 2 + 2 * ring + geometry.index_page_bytes) + 4 * ALIGNMENT
    window = geometry.conv_history * geometry.conv_channels * 2
    state = geometry.kda_heads * geometry.kda_head_dim**2 * 4
    # in decode the tracked copies, in verify what follows each draft: as many again
    return 2 * MAX_ROWS * (window + state) + 4 * ALIGNMENT


ALIGNMENT = 256


class Store:
    """Room for the regions of some layers, taken once: what is saved there stays until it is saved anew.

    Args:
        sizes: bytes of each room, by a key of the caller's.
    """

    def __init__(self, sizes: dict[int, int], device: torch.device) -> None:
        self._room = {key: torch.empty(size, dtype=torch.uint8, device=device) for key, size in sizes.items()}

    def save(self, key: int, regions: list[Region], places: Places) -> list[Tensor]:
        """Copies what the regions hold; returns the copies, views of the room.

        Raises:
            ValueError: the regions are larger than what was taken.
        """
        room, offset, saved = self._room[key], 0, []
        for region in regions:
            index = getattr(places, region.places)
            shape = (len(index), *region.cache.shape[1:])
            size = math.prod(shape) * region.cache.dtype.itemsize
            if offset + size > len(room):
                raise ValueError(
                    f"the {region.name} of a step takes {size} bytes where {len(room) - offset} of {len(room)} are left"
                )
            copy = room[offset : offset + size].view(region.cache.dtype).view(shape)
            torch.index_select(region.cache, 0, index, out=copy)
            saved.append(copy)
            offset = -(-(offset + size) // ALIGNMENT) * ALIGNMENT
        return saved

    @property
    def bytes(self) -> int:
        """Bytes of all rooms."""
        return sum(len(room) for room in self._room.values())


def put_back(regions: list[Region], places: Places, saved: list[Tensor]) -> None:
    """Writes saved regions to where they were."""
    for region, copy in zip(regions, saved, strict=True):
        region.write(places, copy)


def closed_keys(pages: Tensor, lengths: Tensor, geometry: Geometry, *, tiled: bool) -> Tensor:
    """The pooled key of each row's last pool, times its scale: fp32 [rows, 128].

    Args:
        pages: [rows, page bytes] uint8, the index page of each row's token.
        lengths: [rows] int64, tokens that each row sees.
        tiled: whether the keys lie in 16 x 16 tiles.
    """
    entry = (lengths - 1).clamp(min=0) // geometry.pool % geometry.page_pools
    row = torch.arange(len(pages), device=pages.device)
    keys, scales = index_cache.read(pages, row, entry, geometry, "tiled" if tiled else "linear")
    return keys.float() * scales[:, None]
