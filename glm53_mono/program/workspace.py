"""The one buffer a launch works in: named regions and their places, derived from the geometry and the tiling."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from glm53_mono.geometry import MAX_ROWS, Geometry
from glm53_mono.kernels.mhc import MIX_SLOTS
from glm53_mono.kernels.sync import barrier_words
from glm53_mono.program.symmetric import Symmetric, lay_out_symmetric
from glm53_mono.program.tiling import DOT_ROWS, Tiling

ALIGNMENT = 256
"""Bytes; no two regions share a cache line."""

HEADROOM_PAGES = 2
"""Pages beyond the longest context: SGLang's table of slots has some room more (allocation_sizing.py:96-116)."""


@dataclass(frozen=True)
class Region:
    """A named part of the workspace; a private one exists once a program."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    private: bool
    offset: int

    @property
    def bytes(self) -> int:
        """Bytes of the region, or of one program's share of a private one."""
        return _aligned(math.prod(self.shape) * self.dtype.itemsize)


@dataclass(frozen=True)
class Workspace:
    """The regions in order. `workspace.NAME` is a region's offset in bytes: the kernels read it as a constant."""

    regions: tuple[Region, ...]
    programs: int
    mix_tiles: int
    """Output tiles of the hidden width; each leaves one mix partial."""
    router_chunks: int
    """Parts that the router's K is cut into, added in order by whoever reads the logits."""
    attend_chunks: int
    """Key chunks of a row whose selection is full."""
    gates_width: int
    """Columns of `gates`: beta a head, then the low-rank inputs of the two gates, each 16-byte aligned."""
    max_pools: int
    """Pools of the longest context."""
    experts_padded: int
    """Routed experts up to a power of two."""
    index_heads_padded: int
    """Index heads up to a power of two that a matrix product takes."""
    q_rank_padded: int
    """Width of the q latent up to a power of two."""
    distinct_count_at: int
    """Place of the distinct count in `expert_list`, behind the longest list."""
    symmetric: Symmetric
    """Places in the buffer beside the workspace that the ranks share."""

    def __getattr__(self, name: str) -> int:
        for region in self.regions:
            if region.name == name:
                return region.offset
            if name == f"{region.name}_bytes":
                return region.bytes
        raise AttributeError(f"the workspace has no region {name!r}")

    @property
    def size(self) -> int:
        """Bytes of the whole workspace."""
        last = self.regions[-1]
        return last.offset + last.bytes * (self.programs if last.private else 1)

    @property
    def attend_chunks_padded(self) -> int:
        """`attend_chunks` up to a power of two."""
        return _power_of_two(self.attend_chunks)

    @property
    def mix_tiles_padded(self) -> int:
        """`mix_tiles` up to a power of two."""
        return _power_of_two(self.mix_tiles)

    def view(self, buffer: torch.Tensor, name: str) -> torch.Tensor:
        """A region of `buffer` (uint8 [size]) as a tensor; a private one with the programs as first dimension."""
        region = next(r for r in self.regions if r.name == name)
        count = math.prod(region.shape) * region.dtype.itemsize
        if not region.private:
            return buffer[region.offset : region.offset + count].view(region.dtype).view(region.shape)
        own = buffer[region.offset : region.offset + region.bytes * self.programs].view(self.programs, region.bytes)
        return own[:, :count].view(region.dtype).view(self.programs, *region.shape)


def lay_out(geometry: Geometry, tiling: Tiling, phases: int, max_tokens: int) -> Workspace:
    """Places every region.

    Args:
        phases: of the step; the clock has a word for each start and for the end.
        max_tokens: the longest context of a request; it sizes the indexer's scores.
    """
    g, t = geometry, tiling
    mix_tiles = -(-g.hidden // t.output_columns)
    router_chunks = -(-g.hidden // t.router_depth)
    attend_chunks = -(-g.selection_width // t.attend_keys)
    gates_width = _aligned(g.kda_heads, 8) + 2 * g.kda_head_dim
    max_pools = max(1, max_tokens // g.pool)
    bf16, f32, i32 = torch.bfloat16, torch.float32, torch.int32
    rows = MAX_ROWS
    most_experts = rows * g.experts_per_token
    shared = [
        ("words", i32, (barrier_words(t.chiplets),)),
        ("clock", torch.int64, (phases + 1,)),
        ("streams", bf16, (rows, g.streams, g.hidden)),
        ("mix", f32, (mix_tiles, rows, MIX_SLOTS)),
        ("coefficients", f32, (rows, MIX_SLOTS)),
        ("mixed", bf16, (rows, g.hidden)),
        ("qkv", bf16, (rows, g.conv_channels)),
        ("gates", bf16, (rows, gates_width)),
        ("attended", bf16, (rows, max(g.kda_width, g.mla_heads * g.v_head_dim))),
        ("router", f32, (router_chunks, rows, g.experts)),
        ("wide", bf16, (rows, g.dense_width)),
        ("expert_wide", bf16, (1 + most_experts, rows, g.expert_width)),
        ("latents", bf16, (rows, g.q_rank + g.latent)),
        ("index_key", bf16, (rows, g.index_head_dim)),
        ("index_gate", bf16, (rows, g.index_head_dim)),
        ("head_weights", f32, (rows, g.index_heads)),
        ("query", bf16, (rows, g.mla_heads, g.qk_head_dim)),
        ("index_query", bf16, (rows, g.index_heads, g.index_head_dim)),
        ("absorbed", bf16, (rows, g.mla_heads, g.latent)),
        ("scores", f32, (rows, max_pools)),
        ("selected", i32, (rows, g.selected_pools)),
        ("partial", f32, (rows, attend_chunks, g.mla_heads, g.latent)),
        ("partial_max", f32, (rows, attend_chunks, g.mla_heads)),
        ("partial_sum", f32, (rows, attend_chunks, g.mla_heads)),
    ]
    private = [
        ("tile", bf16, (rows, t.output_columns)),
        ("query_latent", bf16, (rows, g.q_rank)),
        ("merged", bf16, (rows, g.latent)),
        ("expert_list", i32, (most_experts + 1,)),
        ("down_address", torch.int64, (1 + most_experts,)),
        ("expert_weight", f32, (rows, g.experts)),
    ]
    placed, offset = [], 0
    for specs, is_private in ((shared, False), (private, True)):
        for name, dtype, shape in specs:
            region = Region(name, dtype, shape, is_private, offset)
            placed.append(region)
            offset += region.bytes * (t.programs if is_private else 1)
    return Workspace(
        regions=tuple(placed),
        programs=t.programs,
        mix_tiles=mix_tiles,
        router_chunks=router_chunks,
        attend_chunks=attend_chunks,
        gates_width=gates_width,
        max_pools=max_pools,
        experts_padded=_power_of_two(g.experts),
        index_heads_padded=max(DOT_ROWS, _power_of_two(g.index_heads)),
        q_rank_padded=_power_of_two(g.q_rank),
        distinct_count_at=most_experts,
        symmetric=lay_out_symmetric(g, t.programs),
    )


def _aligned(count: int, alignment: int = ALIGNMENT) -> int:
    return -(-count // alignment) * alignment


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()
