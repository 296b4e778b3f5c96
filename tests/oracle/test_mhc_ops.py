"""mHC and the norms: SGLang's PyTorch tier at the real widths against the reference, bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from glm53_mono.checkpoint.config import checkpoint_geometry, model_config
from glm53_mono.reference import mhc, norm
from glm53_mono.weights.model import MhcWeights
from tests.oracle.ops import Draw, SeededBug, assert_same_bits, assert_same_roundings, assert_within, bug_cases

pytestmark = pytest.mark.usefixtures("sglang_ops")

SEED = 4
ROWS = 5
GEOMETRY = checkpoint_geometry(model_config())
"""The published model's sizes."""


def case() -> tuple[Tensor, MhcWeights, Tensor]:
    """Streams, weights and a branch's output; one row of zeros, one of subnormal values, one of large ones."""
    draw = Draw(SEED)
    streams = draw.bf16(ROWS, GEOMETRY.streams, GEOMETRY.hidden)
    streams[0] = 0
    streams[1] = 1e-39
    streams[2] *= 1000
    weights = MhcWeights(
        fn=draw.fp32(GEOMETRY.mix, GEOMETRY.stream_width, std=GEOMETRY.stream_width**-0.5),
        scale=draw.fp32(3, std=0.2, mean=1.0),
        # Large enough for the comb not to settle within the Sinkhorn iterations: only then does their order show.
        base=draw.fp32(GEOMETRY.mix, std=4),
        norm=draw.bf16(GEOMETRY.hidden, std=0.1, mean=1.0),
    )
    return streams, weights, draw.bf16(ROWS, GEOMETRY.hidden)


def compare_streams() -> None:
    """What a branch reads, its gates, and what it writes."""
    from sglang.kernels.ops.layernorm.mhc import hc_post, hc_pre

    streams, weights, branch = case()
    flat = streams.flatten(1)
    layer_input, comb, post, _ = hc_pre(
        flat,
        weights.fn,
        weights.scale,
        weights.base,
        GEOMETRY.streams,
        GEOMETRY.rms_eps,
        GEOMETRY.hc_eps,
        GEOMETRY.sinkhorn_iterations,
    )
    gates = mhc.gates(mhc.mix(streams, weights.fn, GEOMETRY.rms_eps), weights, GEOMETRY)
    # The last bit of an exp or of a sum of fp32 depends on its order, and moves a few values over a rounding border.
    assert_within("post", gates.post, post.reshape(gates.post.shape), rel=1e-6, max_abs=1e-5)
    assert_within("comb", gates.comb, comb.reshape(gates.comb.shape), rel=1e-6, max_abs=1e-5)
    assert_same_roundings("layer input", mhc.read(streams, gates.pre), layer_input, odd=5e-4)
    written = hc_post(branch, flat, post, comb, GEOMETRY.streams)
    assert_same_roundings("streams", mhc.write(branch, streams, gates).flatten(1), written, odd=5e-4)


def compare_ends() -> None:
    """The first streams and the last mean."""
    from sglang.kernels.ops.layernorm.mhc import hc_contract, hc_expand

    streams, _, branch = case()
    expanded = mhc.expand(branch, GEOMETRY.streams).flatten(1)
    assert_same_bits("expanded", expanded, hc_expand(branch, GEOMETRY.streams))
    assert_same_bits("contracted", mhc.contract(streams), hc_contract(streams.flatten(1), GEOMETRY.streams))


def compare_norms() -> None:
    """RMSNorm of the hidden width, LayerNorm of the indexer's key."""
    from sglang.srt.layers.layernorm import LayerNorm, RMSNorm

    draw = Draw(SEED)
    streams, _, _ = case()
    rows = streams[:, 0].contiguous()
    rms = RMSNorm(GEOMETRY.hidden, eps=GEOMETRY.rms_eps)
    rms.weight.data = draw.bf16(GEOMETRY.hidden, std=0.1, mean=1.0)
    assert_same_bits("RMSNorm", norm.rms_norm(rows, rms.weight.data, GEOMETRY.rms_eps), rms(rows.clone()).detach())

    keys = rows[:, : GEOMETRY.index_head_dim].contiguous()
    layer = LayerNorm(GEOMETRY.index_head_dim, dtype=torch.float32)
    layer.weight.data = draw.fp32(GEOMETRY.index_head_dim, std=0.1, mean=1.0)
    layer.bias.data = draw.fp32(GEOMETRY.index_head_dim, std=0.1)
    expected = norm.layer_norm(keys, layer.weight.data, layer.bias.data, GEOMETRY.layer_norm_eps)
    assert_same_bits("LayerNorm", expected, layer(keys).detach())


@pytest.mark.parametrize("comparison", [compare_streams, compare_ends, compare_norms])
def test_reference_equals_sglang(comparison: Callable[[], None]) -> None:
    comparison()


def _rows_last(logits: Tensor, iterations: int, eps: float) -> Tensor:
    comb = logits.softmax(-1) + eps
    for _ in range(iterations):
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
    return comb


def _comb_transposed(branch: Tensor, streams: Tensor, gate: mhc.Gates) -> Tensor:
    mixed = (gate.comb.transpose(-1, -2)[..., None] * streams.float()[:, :, None]).sum(1)
    return (gate.post[..., None] * branch.float()[:, None] + mixed).bfloat16()


def _weight_after_rounding(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Hugging Face's order: the normalised value is rounded before the weight multiplies it."""
    values = x.float()
    return (values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + eps)).bfloat16() * weight


SEEDED_BUGS = [
    SeededBug("Sinkhorn ends with the rows", mhc, "sinkhorn", _rows_last, compare_streams),
    SeededBug("comb transposed", mhc, "write", _comb_transposed, compare_streams),
    SeededBug("streams summed, not averaged", mhc, "contract", lambda x: x.float().sum(1).bfloat16(), compare_ends),
    SeededBug("norm weight after the rounding", norm, "rms_norm", _weight_after_rounding, compare_norms),
]


@bug_cases(SEEDED_BUGS)
def test_seeded_bug_is_seen(bug: SeededBug, monkeypatch: pytest.MonkeyPatch) -> None:
    bug.assert_seen(monkeypatch)
