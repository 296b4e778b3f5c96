"""Tile sizes: one table. docs/measurements.md has what chose those of sm_90, and which were never tuned."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from glm53_mono.geometry import MAX_ROWS, Geometry
from glm53_mono.isas import ISAS

DOT_ROWS = 2 * MAX_ROWS
"""Rows of every matrix product, which `tl.dot` wants: a fixed count keeps a row's bits independent of the others."""


@dataclass(frozen=True)
class Tiling:
    """Tile sizes of a compiled kernel. `*_columns` are weight rows of a tile, `*_depth` its K chunk, in elements.

    Every tile but the router's covers its whole K, so a row's sum has one order.
    """

    programs: int
    warps: int
    chiplets: int = 1
    """dies that programs are dealt to in turn; with more than one they meet on each before they meet across them"""
    max_registers: int = 0
    """of a thread, for a compiler that must be told; 0 tells it nothing"""
    stages: int = 5
    short_stages: int = 3
    project_columns: int = 64
    project_depth: int = 256
    output_columns: int = 32
    output_depth: int = 512
    up_columns: int = 64
    up_depth: int = 256
    down_depth: int = 512
    dense_depth: int = 512
    shared_columns: int = 32
    shared_depth: int = 512
    latent_columns: int = 32
    latent_depth: int = 512
    query_columns: int = 32
    query_depth: int = 512
    programs_a_writer: int = 32
    """of which one writes requests' caches while the others compute queries; each request has at most one"""
    router_columns: int = 32
    router_depth: int = 512
    absorb_columns: int = 64
    merge_columns: int = 128
    merge_depth: int = 256
    attend_heads: int = 16
    attend_keys: int = 64
    score_pools: int = 64
    select_pools: int = 2048

    def fitted(self, geometry: Geometry) -> Tiling:
        """The same with every depth cut to a divisor of its matrix's K (which may be small in tests or at high TP)."""
        g = geometry
        widths = {
            "project_depth": (g.hidden,),
            "output_depth": (g.kda_width, g.mla_heads * g.v_head_dim),
            "up_depth": (g.hidden,),
            "down_depth": (g.expert_width,),
            "dense_depth": (g.dense_width,),
            "latent_depth": (g.hidden,),
            "query_depth": (g.q_rank,),
            "router_depth": (g.hidden,),
            "merge_depth": (g.latent,),
            "shared_depth": (g.hidden,),
        }
        cut = {name: math.gcd(getattr(self, name), *ks) for name, ks in widths.items()}
        return replace(self, **cut)


TILINGS = {
    "sm_90": Tiling(ISAS["sm_90"].compute_units, warps=8, max_registers=255),
    "gfx950": Tiling(ISAS["gfx950"].compute_units, warps=4, chiplets=ISAS["gfx950"].chiplets, stages=2),
    "interp": Tiling(
        programs=3,
        warps=4,
        stages=1,
        project_columns=128,
        project_depth=512,
        output_columns=128,
        up_columns=128,
        up_depth=512,
        shared_columns=128,
        latent_columns=128,
        query_columns=128,
        router_depth=256,
        select_pools=256,
    ),
}
"""Per ISA. `sm_90` was measured (docs/measurements.md). `gfx950` was compiled alone: with 8 warps it spills 182
registers, with 4 none, and its 72 KB of LDS fit. `interp` trades tiles for speed of the interpreter, which pays by the
operation.
"""
