"""Quantised weights at the real widths on a GPU: parts within bounds, and a row's bits whatever the others are.

None of this has run yet. On an H200, in this order:

1. These tests. Values were exact in the interpreter, so a part beyond its bound is due to what the interpreter has not:
   alignment (`stored.matrix_in`), the pipeline, the registers behind `tl.join`.
2. Whether bf16 still takes its 10.15 ms: its PTX is that of the commit before FP8.
3. `glm53-mono bench --phases` beside SGLang's FP8 forward, on `checkpoint --format fp8 --experts 32 --config-only`. A
   row reads 21.5 GB, experts are 9.5 of them. sm_90's assembly spends 4.2 (tiles of 64 columns) to 5.0 (of 32)
   instructions a byte and lane; 7.1 are there at 4.2 TB/s, bf16 takes 0.9. A phase far from its floor is short of them:
   wider tiles for narrow formats come first, since each warp brings the activations in order for its own columns
   alone; then `stored.NARROW_DEPTH` and stages.
4. `glm53-mono bench --alone --phases` on MXFP4: 15 (64 columns) to 17 (32) instructions a byte, so its experts cannot
   reach half of the copy bandwidth. PTX of one's own in `mxfp4.widened` that scales two values at once takes about 9.
"""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch

from glm53_mono.weights.descriptor import Layout
from glm53_mono.weights.formats import Formats
from glm53_mono.weights.published import FP8_CHECKPOINT, QUARK_CHECKPOINT
from tests.kernels import full_width, rig
from tests.kernels.batches import BATCHES, assert_same_bits, run_in_batches
from tests.kernels.compare import compare_step
from tests.kernels.full_width import full_step
from tests.kernels.quantised import stored_as

pytestmark = pytest.mark.gpu

LENGTHS = [1, 255, 256, 1023, 2051, 2052, 4099, 8190]
SHUFFLED = Formats(
    **{
        field.name: replace(getattr(QUARK_CHECKPOINT, field.name), layout=Layout.SHUFFLED)
        for field in fields(QUARK_CHECKPOINT)
    }
)
"""AITER's orders are what ROCm servers have; the addresses are the same on any GPU."""

REAL = pytest.mark.parametrize(
    "formats", [FP8_CHECKPOINT, QUARK_CHECKPOINT, SHUFFLED], ids=["FP8", "Quark", "Quark shuffled"]
)


def stored_model(formats: Formats, *, fused: bool) -> rig.Model:
    model = stored_as(full_width.full_model(fused=fused), formats)
    torch.cuda.empty_cache()
    return model


@REAL
@pytest.mark.parametrize("fused", [False, True], ids=["shared expert apart", "shared expert fused"])
def test_parts_are_within_bounds(seed: int, formats: Formats, fused: bool) -> None:
    model = stored_model(formats, fused=fused)
    compare_step(model, *full_step(model, LENGTHS, seed), backend="cuda").report.assert_right()


@REAL
def test_a_rows_bits_do_not_depend_on_the_others(seed: int, formats: Formats) -> None:
    model = stored_model(formats, fused=True)
    step = full_step(model, LENGTHS, seed)
    expected = run_in_batches(model, *step, [list(range(8))], backend="cuda")
    for batches in BATCHES:
        assert_same_bits(run_in_batches(model, *step, batches, backend="cuda"), expected)
