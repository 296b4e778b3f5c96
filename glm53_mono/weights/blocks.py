"""Whether the matrices of a rank are whole numbers of their format's blocks, by their sizes alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from glm53_mono.geometry import FP8_BLOCK, MXFP4_BLOCK, Geometry
from glm53_mono.weights.descriptor import Format
from glm53_mono.weights.formats import Formats

FOLDED_BLOCKS = 2 * MXFP4_BLOCK
"""Columns of which a loop takes a multiple: it folds a chunk of a row into two halves of whole blocks."""


def broken_blocks(geometry: Geometry, formats: Formats) -> list[str]:
    """One line for each matrix that a rank's share cuts through a block.

    Args:
        geometry: of the rank.
        formats: of the checkpoint.
    """
    return [
        f"{name} has {size} {what} on a rank at TP {geometry.tp_size}, which is no multiple of {unit}, its block in "
        f"{storage}"
        for field in fields(formats)
        for storage in (getattr(formats, field.name),)
        for name, rows, columns in _sizes(field.name, geometry)
        for size, what, unit in _units(storage.format, rows, columns)
        if size % unit
    ]


def _units(kind: Format, rows: int, columns: int) -> Iterator[tuple[int, str, int]]:
    if kind == Format.FP8:
        yield rows, "rows", FP8_BLOCK
        yield columns, "columns", FP8_BLOCK
    if kind == Format.MXFP4:
        yield columns, "columns", FOLDED_BLOCKS


def _sizes(field: str, g: Geometry) -> tuple[tuple[str, int, int], ...]:
    """The checkpoint's names of a kind of matrix, each with a rank's rows and columns of it."""
    return {
        "latents": (("q_a_proj", g.q_rank, g.hidden), ("kv_a_proj_with_mqa", g.latent, g.hidden)),
        "index_key": (("indexer.wk", g.index_head_dim, g.hidden),),
        "query": (("q_b_proj", g.mla_heads * g.qk_head_dim, g.q_rank),),
        "index_query": (("indexer.wq_b", g.index_heads * g.index_head_dim, g.q_rank),),
        "attention_output": (("self_attn.o_proj", g.hidden, g.mla_heads * g.v_head_dim),),
        "dense_up": (("mlp.gate_proj", g.dense_width, g.hidden),),
        "dense_down": (("mlp.down_proj", g.hidden, g.dense_width),),
        "shared_up": (("mlp.shared_experts.gate_proj", g.expert_width, g.hidden),),
        "experts_up": (("mlp.experts.gate_proj", g.expert_width, g.hidden),),
        "down": (("mlp.experts.down_proj", g.hidden, g.expert_width),),
    }[field]
