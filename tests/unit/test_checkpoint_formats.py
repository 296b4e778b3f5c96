"""Quantised synthetic checkpoints: published sizes and names, and SGLang's own loader takes them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from glm53_mono.checkpoint.config import SCALES, ConfigError, model_config
from glm53_mono.checkpoint.formats import WeightFormat
from glm53_mono.checkpoint.tensors import tensor_table
from glm53_mono.cli.checkpoint import checkpoint_tensors, write_checkpoint
from glm53_mono.numerics import QUANTISED_ACTIVATIONS, distance
from glm53_mono.weights import fp8, mxfp4

LAYERS = 5
VISION_BYTES = 2 * 0.56e9
LAYER = "model.language_model.layers."


def small(weight_format: WeightFormat) -> dict:
    return model_config(LAYERS, 4, "small", weight_format=weight_format)


@pytest.mark.parametrize(
    ("weight_format", "published"), [(WeightFormat.FP8, 328.3e9), (WeightFormat.MXFP4, 185_066_521_464)]
)
def test_sizes_are_the_published_ones(weight_format: WeightFormat, published: float) -> None:
    table = tensor_table(model_config(weight_format=weight_format))
    assert sum(spec.bytes for spec in table) + VISION_BYTES == pytest.approx(published, rel=1e-3)


def test_names_are_the_published_ones() -> None:
    found = {kind: {spec.name: spec.dtype for spec in tensor_table(small(kind))} for kind in WeightFormat}
    expert = f"{LAYER}3.mlp.experts.0.up_proj.weight"
    assert found[WeightFormat.FP8][f"{expert}_scale_inv"] == "float32"
    assert found[WeightFormat.MXFP4][f"{expert}_scale"] == "uint8"
    query = f"{LAYER}3.self_attn.q_b_proj.weight"
    assert found[WeightFormat.MXFP4][f"{query}_scale"] == "float32"
    mtp = f"{LAYER}{LAYERS}.mlp.experts.0.up_proj.weight"
    assert found[WeightFormat.MXFP4][mtp] == found[WeightFormat.FP8][mtp] == "float8_e4m3fn"
    assert all(kinds[f"{LAYER}0.self_attn.q_proj.weight"] == "bfloat16" for kinds in found.values())
    assert not any("scale" in name for name in found[WeightFormat.BF16] if "hc_" not in name)


def test_values_stand_for_the_bf16_checkpoints() -> None:
    plain = dict(checkpoint_tensors(small(WeightFormat.BF16), 3))
    name = f"{LAYER}4.mlp.experts.1.down_proj.weight"
    for kind, suffix, module, most in (
        (WeightFormat.FP8, "_scale_inv", fp8, 0.03),
        (WeightFormat.MXFP4, "_scale", mxfp4, 0.15),
    ):
        drawn = dict(checkpoint_tensors(small(kind), 3))
        found = module.dequantised(drawn[name], drawn[name + suffix])
        assert most / 4 < distance(found, plain[name]).rel < most
        assert torch.equal(drawn["lm_head.weight"], plain["lm_head.weight"])


def test_a_matrix_without_whole_blocks_is_named() -> None:
    odd = replace(SCALES["small"], q_rank=96)
    with pytest.raises(ConfigError, match=r"layers.3.self_attn.q_a_proj.weight is 96 x 512, .* fp8 blocks"):
        tensor_table(model_config(LAYERS, 4, odd, weight_format=WeightFormat.FP8))


@pytest.mark.slow
def test_sglang_fills_target_and_draft(tmp_path: Path) -> None:
    kinds = (WeightFormat.FP8, WeightFormat.MXFP4)
    for kind in kinds:
        write_checkpoint(tmp_path / kind, small(kind), seed=0)
    script = Path(__file__).with_name("load_quantised_with_sglang.py")
    command = [sys.executable, str(script), *(str(tmp_path / kind) for kind in kinds)]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    finished = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert finished.returncode == 0, finished.stderr[-2000:]
    shared_with_target = ["model.embed_tokens.weight", "lm_head.weight"]
    dtypes = {}
    for kind, (target, draft) in zip(kinds, json.loads(finished.stdout.splitlines()[-1]), strict=True):
        assert target["unfilled"] == []
        assert draft["unfilled"] == shared_with_target
        dtypes[kind] = target["dtypes"]
        assert draft["dtypes"]["model.decoder.mlp.experts.w13_weight"] == "torch.float8_e4m3fn"
        # the name that is read, whatever the checkpoint's own is
        assert target["dtypes"]["model.layers.3.self_attn.q_b_proj.weight_scale_inv"] == "torch.float32"
    experts = "model.layers.3.mlp.experts.w13_weight"
    assert dtypes[WeightFormat.FP8][experts] == "torch.float8_e4m3fn"
    assert dtypes[WeightFormat.MXFP4][experts] == dtypes[WeightFormat.MXFP4][f"{experts}_scale"] == "torch.uint8"
    assert dtypes[WeightFormat.MXFP4]["model.layers.0.mlp.down_proj.weight"] == "torch.float8_e4m3fn"
    assert dtypes[WeightFormat.MXFP4]["model.layers.0.self_attn.o_proj.weight"] == "torch.bfloat16"


def test_activations_that_sglang_rounds_stay_within_their_bounds(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(8, 2048, generator=generator).bfloat16()
    weights = torch.randn(256, 2048, generator=generator)
    blocks = x.float().unflatten(-1, (-1, 128))
    scale = blocks.abs().amax(-1, keepdim=True) / fp8.E4M3_MAX
    rounded = {
        "fp8": ((blocks / scale).to(torch.float8_e4m3fn).float() * scale).flatten(-2),
        "mxfp4": mxfp4.dequantised(*mxfp4.quantised(x)),
    }
    for name, activations in rounded.items():
        found = distance(activations @ weights.T, x.float() @ weights.T)
        bound = QUANTISED_ACTIVATIONS[name]
        assert found.within(bound)
        assert found.rel > bound.rel / 2
