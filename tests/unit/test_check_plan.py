"""The check's bounds: as in bf16, and wider exactly where SGLang rounds activations for quantised weights."""

from __future__ import annotations

import pytest

from glm53_mono.check import plan
from glm53_mono.checkpoint.config import checkpoint_geometry, model_config
from glm53_mono.numerics import QUANTISED_ACTIVATIONS
from glm53_mono.weights.formats import Formats
from glm53_mono.weights.published import FP8_CHECKPOINT, QUARK_CHECKPOINT

GEOMETRY = checkpoint_geometry(model_config(8, 8, "small", mtp=False))
MLA = ("attention", "latent"), ("attention", "chosen pools"), ("attention", "output")
FFN = ("ffn", "output")


def bounds(formats: Formats) -> dict[tuple[int, str, str], float]:
    return {(c.layer, c.part, c.value): c.bound.rel for c in plan.comparisons(GEOMETRY, formats, verify=False)}


@pytest.mark.parametrize(
    ("formats", "experts", "wider"),
    [
        (FP8_CHECKPOINT, "fp8", {*MLA, FFN}),
        (QUARK_CHECKPOINT, "mxfp4", {*MLA, FFN, ("attention", "ring keys"), ("attention", "index keys")}),
    ],
    ids=["FP8", "Quark"],
)
def test_bounds_are_wider_where_sglang_rounds(formats: Formats, experts: str, wider: set[tuple[str, str]]) -> None:
    plain, found = bounds(Formats()), bounds(formats)
    assert plain.keys() == found.keys()
    grown = {key for key in plain if found[key] > plain[key]}
    assert {key[1:] for key in grown} == wider
    assert {key for key in plain if found[key] < plain[key]} == set()
    # KDA layers keep theirs, but for their FFN
    assert {layer for layer, part, _ in grown if part == "attention"} == set(GEOMETRY.dsa_layers)
    sparse, dense = (GEOMETRY.layers - 1, *FFN), (0, *FFN)
    assert found[sparse] - plain[sparse] == pytest.approx(3 * QUANTISED_ACTIVATIONS[experts].rel)
    assert found[dense] - plain[dense] == pytest.approx(3 * QUANTISED_ACTIVATIONS["fp8"].rel)
