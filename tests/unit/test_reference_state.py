"""Step inputs, caches and the layouts of the index cache."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from glm53_mono.reference import index_cache
from glm53_mono.reference.index_cache import KeyLayout
from glm53_mono.reference.state import Caches, StepInputs
from tests.unit.reference_serving import Server, tiny_model

_, GEOMETRY = tiny_model(1)


def verify_inputs(seed: int) -> StepInputs:
    """Two requests of three drafts, the second one padding."""
    server = Server.open(GEOMETRY, requests=1, pages_each=1, draft_tokens=3, seed=seed)
    server.requests[0].committed = 5
    return server.inputs("target_verify", [(server.requests[0], [1, 2, 3]), (None, [4, 5, 6])])


def test_rows_of_a_verify_step(seed: int) -> None:
    inputs = verify_inputs(seed)
    assert (inputs.requests, inputs.rows) == (2, 6)
    assert inputs.row_requests.tolist() == [0, 0, 0, 1, 1, 1]
    assert inputs.row_lengths.tolist() == [6, 7, 8, 1, 2, 3]
    assert inputs.linear_active.tolist() == inputs.sparse_active.tolist() == [True, False]


def test_rows_of_a_decode_step(seed: int) -> None:
    server = Server.open(GEOMETRY, requests=2, pages_each=1, draft_tokens=3, seed=seed)
    server.requests[1].committed = 7
    inputs = server.inputs("decode", [(server.requests[1], [9]), (None, [0]), (server.requests[0], [8])])
    assert inputs.row_lengths.tolist() == [8, 1, 1]
    assert inputs.sparse_active.tolist() == [True, False, True]
    late = replace(inputs, positions=inputs.seq_lens.clone())
    assert not late.sparse_active.any(), "a position that does not precede its length is skipped"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mode": "extend"}, "mode 'extend' is neither"),
        ({"mode": "decode"}, "a decode step has 1 token a request, not 3"),
        ({"positions": torch.zeros(2)}, r"positions has shape \(2,\), this step wants \(6,\)"),
        ({"mamba_slots": torch.zeros(3)}, r"mamba_slots has shape \(3,\), this step wants \(2,\)"),
    ],
)
def test_inconsistent_inputs_are_refused(seed: int, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(verify_inputs(seed), **change)


def caches() -> Caches:
    return Caches.empty(GEOMETRY, mamba_slots=2, request_rows=3, pages=2, draft_tokens=4, verify_rows=2)


def test_cache_shapes_are_sglangs() -> None:
    shapes = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in caches().tensors()}
    head, channels = GEOMETRY.kda_head_dim, 3 * GEOMETRY.kda_width
    bf16, fp32 = torch.bfloat16, torch.float32
    assert shapes == {
        "conv": ((2, 3, 3, channels), bf16),
        "temporal": ((2, 3, 1, head, head), fp32),
        "intermediate_ssm": ((2, 3, 4, 1, head, head), fp32),
        "intermediate_conv": ((2, 3, 4, 3, channels), bf16),
        "latent.0": ((512, 1, 128), bf16),
        "index.0": ((2, 64 * (128 + 4)), torch.uint8),
        "ring_key.0": ((4, 8, 128), bf16),
        "ring_gate.0": ((4, 8, 128), bf16),
    }


def test_a_clone_shares_nothing_and_poison_reaches_everything() -> None:
    original = caches()
    clone = original.clone()
    clone.poison()
    for (name, kept), (_, poisoned) in zip(original.tensors(), clone.tensors(), strict=True):
        assert not kept.any(), name
        values = poisoned.view(torch.float8_e4m3fn) if poisoned.dtype == torch.uint8 else poisoned
        assert values.float().isnan().all(), name


@pytest.mark.parametrize("layout", ["linear", "tiled"])
def test_keys_and_scales_of_a_page_use_each_byte_once(layout: KeyLayout) -> None:
    entries = torch.arange(GEOMETRY.page_pools)
    keys = index_cache.key_offsets(entries, GEOMETRY, layout)
    scales = index_cache.scale_offsets(entries, GEOMETRY)
    used = torch.cat((keys.flatten(), scales.flatten())).sort().values
    assert torch.equal(used, torch.arange(GEOMETRY.index_page_bytes))


@pytest.mark.parametrize("layout", ["linear", "tiled"])
def test_what_is_written_is_read(seed: int, layout: KeyLayout) -> None:
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(5, GEOMETRY.index_head_dim, generator=generator).to(torch.float8_e4m3fn)
    scales = torch.rand(5, generator=generator)
    pages, entries = torch.tensor([0, 1, 1, 0, 1]), torch.tensor([63, 0, 17, 5, 63])
    cache = torch.full((2, GEOMETRY.index_page_bytes), 0x7F, dtype=torch.uint8)
    index_cache.write(cache, pages, entries, keys, scales, GEOMETRY, layout)
    found_keys, found_scales = index_cache.read(cache, pages, entries, GEOMETRY, layout)
    assert torch.equal(found_keys.view(torch.uint8), keys.view(torch.uint8))
    assert torch.equal(found_scales, scales)
    assert (cache == 0x7F).sum() > cache.numel() - 5 * (GEOMETRY.index_head_dim + 4) - 1, "nothing else was written"


def test_tiles_of_the_rocm_layout() -> None:
    """Pool 17, channel 33: the second tile row, the third tile, second pool and second channel in it."""
    offsets = index_cache.key_offsets(torch.tensor(17), GEOMETRY, "tiled")
    assert offsets[33] == 16 * 128 + 2 * 256 + 1 * 16 + 1


def test_an_unknown_layout_is_refused() -> None:
    with pytest.raises(ValueError, match="layout 'rows' is neither 'linear' nor 'tiled'"):
        index_cache.key_offsets(torch.tensor(0), GEOMETRY, "rows")
