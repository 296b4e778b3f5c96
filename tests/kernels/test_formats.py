"""Quantised weights in the kernels: whole steps against the reference on the dequantised weights, and every value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from glm53_mono.geometry import FP8_BLOCK
from glm53_mono.kernels import dense, fp8, gemv, moe, mxfp4, output, stored
from glm53_mono.kernels.record import RECORD, SCALES_BEHIND
from glm53_mono.weights import fp8 as fp8_weights
from glm53_mono.weights import mxfp4 as mxfp4_weights
from glm53_mono.weights import shuffled
from glm53_mono.weights.descriptor import Format, Layout, Storage
from glm53_mono.weights.formats import Formats
from glm53_mono.weights.published import FP8_CHECKPOINT, QUARK_CHECKPOINT, held_by_aiter
from tests.kernels import rig
from tests.kernels.compare import Comparison
from tests.kernels.quantised import TINY_BLOCKS, TINY_TILES, stored_as
from tests.kernels.rig import EVERY_PHASE, ONE_KDA, Pattern, tiny_model
from tests.kernels.seeded_bugs import edited

EVERYTHING_FP8 = replace(FP8_CHECKPOINT, index_key=Storage(Format.FP8), index_query=Storage(Format.FP8))
LAYOUTS = pytest.mark.parametrize("layout", Layout, ids=lambda layout: layout.name.lower())
DENSE_KDA = Pattern(kda_layers=(0,), layers=1, dense_layers=1)


def comparison(seed: int, formats: Formats, pattern: Pattern, *, fused: bool = True, aiter: bool = False) -> Comparison:
    scale = TINY_TILES if aiter else TINY_BLOCKS
    plain = tiny_model(pattern, seed=seed, fused=fused, experts=3, scale=scale, sinkhorn_iterations=2)
    if aiter:
        formats = held_by_aiter(formats, plain.geometry, shared_fused=fused)
    for layer in plain.weights.layers:
        # blocks of one matrix whose scales are far apart
        layer.ffn.gate_up[..., : layer.ffn.gate_up.shape[-2] // 2, -FP8_BLOCK:].mul_(3)
    model = stored_as(plain, formats)
    inputs = rig.step_inputs(model.geometry, [68, 7], tokens=1, seed=seed, max_tokens=256)
    caches = rig.random_caches(model.geometry, requests=2, pages=rig.pages_of(inputs, model.geometry), seed=seed)
    return Comparison.prepare(model, caches, inputs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("formats", "fused"),
    [(FP8_CHECKPOINT, True), (EVERYTHING_FP8, False), (QUARK_CHECKPOINT, False)],
    ids=["FP8 fused", "FP8 with indexer", "Quark apart"],
)
def test_a_step_is_that_of_the_dequantised_weights(seed: int, formats: Formats, fused: bool) -> None:
    comparison(seed, formats, EVERY_PHASE, fused=fused).whole_step().assert_right()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("formats", "fused"),
    [(EVERYTHING_FP8, True), (QUARK_CHECKPOINT, True), (QUARK_CHECKPOINT, False)],
    ids=["FP8", "Quark fused", "Quark apart"],
)
def test_a_step_reads_what_aiter_has_shuffled(seed: int, formats: Formats, fused: bool) -> None:
    comparison(seed, formats, EVERY_PHASE, fused=fused, aiter=True).whole_step().assert_right()


@pytest.mark.parametrize("formats", [FP8_CHECKPOINT, QUARK_CHECKPOINT], ids=["FP8", "Quark"])
@pytest.mark.parametrize("place", ["row_place", "column_place", "scale_place"])
def test_a_wrong_place_is_found(seed: int, formats: Formats, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that AITER has shuffled, read as if they lay row by row."""
    readers = [reader for reader in (fp8, mxfp4) if hasattr(reader, place)]
    for reader in readers:
        right = getattr(reader, place)
        monkeypatch.setattr(reader, place, lambda *arguments, right=right: right(*arguments[:-1], int(Layout.LINEAR)))
    found = comparison(seed, formats, DENSE_KDA if formats is FP8_CHECKPOINT else ONE_KDA, aiter=True).whole_step()
    assert bool(found.failures) == (place != "scale_place" or formats is QUARK_CHECKPOINT)


def with_reader(monkeypatch: pytest.MonkeyPatch, name: str, wrong: Callable[..., Any]) -> None:
    """Another function in the place of one format's `add_chunk`."""
    monkeypatch.setattr(stored, name, type("wrong", (), {"add_chunk": staticmethod(wrong)}))


SCALE_OF_BLOCK = "row // BLOCK * (K // BLOCK) + (begin + half) // BLOCK"
TRANSPOSED = "row // BLOCK + (begin + half) // BLOCK * 2"


@pytest.mark.parametrize(
    ("module", "old", "new", "formats", "pattern"),
    [
        (fp8, SCALE_OF_BLOCK, TRANSPOSED, FP8_CHECKPOINT, DENSE_KDA),
        (
            mxfp4,
            "tl.join(bytes_of(even), bytes_of(odd))",
            "tl.join(bytes_of(odd), bytes_of(even))",
            QUARK_CHECKPOINT,
            ONE_KDA,
        ),
    ],
    ids=["FP8 scales transposed", "nibbles swapped"],
)
def test_a_wrong_reader_is_found(
    seed: int, module: Any, old: str, new: str, formats: Formats, pattern: Pattern,
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
) -> None:  # fmt: skip
    with_reader(monkeypatch, module.__name__.rpartition(".")[2], edited(module, old, new, tmp_path).add_chunk)
    assert comparison(seed, formats, pattern).whole_step().failures


@pytest.mark.parametrize("mistake", ["gate and up swapped", "clamp dropped"])
@pytest.mark.parametrize("formats", [FP8_CHECKPOINT, QUARK_CHECKPOINT], ids=["FP8", "Quark"])
def test_a_wrong_expert_is_found(seed: int, mistake: str, formats: Formats, monkeypatch: pytest.MonkeyPatch) -> None:
    right = moe.clamped_swiglu
    if mistake == "clamp dropped":
        monkeypatch.setattr(moe, "clamped_swiglu", lambda gate, up, _limit: right(gate, up, 1e30))
    else:
        monkeypatch.setattr(moe, "clamped_swiglu", lambda gate, up, limit: right(up, gate, limit))
    assert comparison(seed, formats, ONE_KDA).whole_step().failures


@triton.jit
def product(x, record, out, K: tl.constexpr, COLUMNS: tl.constexpr, STORAGE: tl.constexpr, BACKEND: tl.constexpr):
    """One tile of x [8, K] against the whole matrix of a record's word 0, fp32 [8, COLUMNS]."""
    acc = gemv.zero_tile(COLUMNS)
    row = gemv.folded_columns(COLUMNS)
    matrix, scales = stored.matrix_in(record, 0, STORAGE)
    acc = stored.add_chunk(acc, x, K, 8, matrix, scales, row, 0, K, K, STORAGE, BACKEND)
    tl.store(out + tl.arange(0, 8)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :], gemv.unfold(acc, COLUMNS))


def stored_columns(
    values: Tensor, scales: Tensor, kind: Format, columns: int, layout: Layout, backend: str = "interp"
) -> Tensor:
    """The weights as the kernel sees them, fp32: each column of K against a row of activations that is 1 there."""
    if layout == Layout.SHUFFLED:
        values = shuffled.shuffled(values)
        scales = scales if kind == Format.FP8 else shuffled.shuffled_scales(scales)
    rows = values.shape[0]
    seen = torch.empty(rows, columns)
    record = torch.zeros(RECORD, dtype=torch.int64)
    record[0], record[SCALES_BEHIND] = values.data_ptr(), scales.data_ptr()
    for first in range(0, columns, 8):
        x = torch.zeros(8, columns, dtype=torch.bfloat16)
        x[torch.arange(8), first + torch.arange(8)] = 1
        out = torch.empty(8, rows)
        product[(1,)](x, record, out, columns, rows, Storage(kind, layout), backend)
        seen[:, first : first + 8] = out.T
    return seen


def same_bits(found: Tensor, expected: Tensor) -> bool:
    """Bit for bit, one NaN as good as another."""
    alike = (found.view(torch.int32) == expected.view(torch.int32)) | (found.isnan() & expected.isnan())
    return bool(alike.all())


@LAYOUTS
@pytest.mark.parametrize("backend", ["interp", "hip"])
def test_every_fp8_value_is_read_as_it_is(layout: Layout, backend: str) -> None:
    """Each byte in a row of its own, since two of them are NaN, beside scales that are no powers of two."""
    values = torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, 256).view(torch.float8_e4m3fn)
    scales = torch.tensor([[0.7123, 3.1e-5], [1.9e4, 0.011]])
    expected = fp8_weights.dequantised(values, scales)
    found = stored_columns(values, scales, Format.FP8, 256, layout, backend)
    assert same_bits(found + 0.0, expected + 0.0)
    assert expected.isnan().any(1).sum() == 2
    assert not same_bits(found, fp8_weights.dequantised(values, scales.T.contiguous()))


@LAYOUTS
def test_every_mxfp4_value_and_scale_is_read_as_it_is(layout: Layout) -> None:
    """Every byte beside every scale that is accepted, the smallest, 2^-127, included."""
    scales = torch.arange(256, dtype=torch.uint8)[:, None].clamp(max=mxfp4_weights.LARGEST_SCALE).repeat(1, 16)
    pairs = torch.arange(256, dtype=torch.uint8).repeat(256, 1)
    expected = mxfp4_weights.dequantised(pairs, scales)
    found = stored_columns(pairs, scales, Format.MXFP4, 512, layout)
    assert torch.equal(found, expected)
    assert found[0].count_nonzero() == 512 * 14 // 16
    swapped = (pairs >> 4) | (pairs << 4)
    assert not torch.equal(found, mxfp4_weights.dequantised(swapped, scales))


@LAYOUTS
def test_rocm_reads_every_mxfp4_scale_but_the_smallest(layout: Layout) -> None:
    """`tl.dot_scaled` as the interpreter has it; the scales above 252 make 6 infinite."""
    scales = torch.arange(256, dtype=torch.uint8)[:, None].clamp(1, 252).repeat(1, 16)
    pairs = torch.arange(256, dtype=torch.uint8).repeat(256, 1)
    found = stored_columns(pairs, scales, Format.MXFP4, 512, layout, "hip")
    assert torch.equal(found, mxfp4_weights.dequantised(pairs, scales))


def test_readers_are_those_that_the_phases_call() -> None:
    """What the mistakes above replace is what runs."""
    assert {module.add_chunk for module in (dense, moe, output)} == {stored.add_chunk}
