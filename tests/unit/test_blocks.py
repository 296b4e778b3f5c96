"""Blocks that a rank's share would cut are named before anything is loaded."""

from __future__ import annotations

from dataclasses import fields, replace
from types import SimpleNamespace

import pytest

from glm53_mono.checkpoint.config import model_config
from glm53_mono.geometry import TP_SIZES, Geometry
from glm53_mono.weights.blocks import broken_blocks
from glm53_mono.weights.formats import Formats
from glm53_mono.weights.published import CHECKPOINTS, FP8_CHECKPOINT, QUARK_CHECKPOINT


def geometry(tp_size: int) -> Geometry:
    return Geometry.from_config(SimpleNamespace(**model_config()["text_config"]), tp_size)


@pytest.mark.parametrize("tp_size", TP_SIZES)
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_the_published_checkpoints_have_whole_blocks(name: str, tp_size: int) -> None:
    assert broken_blocks(geometry(tp_size), CHECKPOINTS[name]) == []


@pytest.mark.parametrize(
    ("change", "formats", "names"),
    [
        ({"dense_width": 96}, FP8_CHECKPOINT, ["mlp.gate_proj has 96 rows", "mlp.down_proj has 96 columns"]),
        ({"q_rank": 96}, FP8_CHECKPOINT, ["q_a_proj has 96 rows", "q_b_proj has 96 columns"]),
        ({"q_rank": 96}, QUARK_CHECKPOINT, ["q_a_proj has", "q_b_proj has", "indexer.wq_b has 96 columns"]),
        ({"expert_width": 96}, QUARK_CHECKPOINT, ["mlp.experts.down_proj has 96 columns on a rank at TP 2"]),
        ({"expert_width": 96}, Formats(), []),
    ],
)
def test_a_cut_block_is_named(change: dict[str, int], formats: Formats, names: list[str]) -> None:
    found = broken_blocks(replace(geometry(2), **change), formats)
    assert len(found) == len(names)
    assert all(text.startswith(name) for text, name in zip(found, names, strict=True))


def test_every_kind_of_matrix_has_its_size() -> None:
    blocks = FP8_CHECKPOINT.query
    everything = Formats(**{field.name: blocks for field in fields(Formats)})
    assert broken_blocks(geometry(1), everything) == []
    assert len(broken_blocks(replace(geometry(1), hidden=4100), everything)) >= len(fields(Formats)) - 2
