"""A model as SGLang has loaded it passes the model check, and each way of spoiling its weights is named."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tests.oracle.sglang_cpu import context

context.prepare_environment()

from glm53_mono.checkpoint.config import checkpoint_geometry
from glm53_mono.cli.checkpoint import checkpoint_tensors
from glm53_mono.spec import SPEC
from glm53_mono.upstream.model import model_layers
from glm53_mono.weights import fp8, mxfp4, shuffled
from glm53_mono.weights.copies import BIAS, SHARED_DOWN, Copies, total_bytes
from glm53_mono.weights.descriptor import Format, Layout, Storage
from glm53_mono.weights.formats import Formats, common_formats
from tests.oracle.sglang_cpu.forward import serving
from tests.oracle.sglang_cpu.models import ONE_OF_EACH, small_config

SEED = 53
CONFIG = small_config(ONE_OF_EACH)


@pytest.fixture(scope="module")
def loaded() -> Iterator[Any]:
    """SGLang's own model with a synthetic checkpoint's weights."""
    torch.set_num_threads(1)
    with serving(
        CONFIG, checkpoint_tensors(CONFIG, SEED), requests=1, max_context=256, pages=2, draft_tokens=1
    ) as server:
        yield server.model


def reasons(model: Any) -> list[str]:
    """What our spec says about a loaded model."""
    return SPEC.model_disable_reasons(model, model.config, {})


def test_a_loaded_model_is_accepted(loaded: Any) -> None:
    assert reasons(loaded) == []


def _fp8(model: Any) -> None:
    projection = model.model.layers[0].self_attn.o_proj
    projection.weight = torch.nn.Parameter(projection.weight.to(torch.float8_e4m3fn), requires_grad=False)


def _in_blocks(layer: Any, name: str, *, scales: bool = True) -> None:
    """A layer's weight in FP8 blocks, as `Fp8LinearMethod` and `Fp8MoEMethod` leave it on CUDA."""
    values, found = fp8.quantised(getattr(layer, name).data)
    setattr(layer, name, torch.nn.Parameter(values, requires_grad=False))
    if scales:
        setattr(layer, f"{name}_scale_inv", torch.nn.Parameter(found, requires_grad=False))


def _in_mxfp4(layer: Any, name: str) -> None:
    """A layer's weight in MXFP4, as Quark's schemes register it."""
    values, scales = mxfp4.quantised(getattr(layer, name).data)
    setattr(layer, name, torch.nn.Parameter(values, requires_grad=False))
    setattr(layer, f"{name}_scale", torch.nn.Parameter(scales, requires_grad=False))


def _sparse(model: Any) -> list[Any]:
    return [layer.mlp for layer in model.model.layers if hasattr(layer.mlp, "experts")]


def _quark_experts(model: Any) -> None:
    for mlp in _sparse(model):
        _in_mxfp4(mlp.experts, "w13_weight")
        _in_mxfp4(mlp.experts, "w2_weight")
        if mlp.shared_experts is not None:
            _in_mxfp4(mlp.shared_experts.gate_up_proj, "weight")
            _in_mxfp4(mlp.shared_experts.down_proj, "weight")


def _aiter_quark_experts(model: Any) -> None:
    _quark_experts(model)
    for mlp in _sparse(model):
        mlp.experts.w2_weight.is_shuffled = True


def _aiter_fp8(model: Any) -> None:
    """As SGLang keeps FP8 blocks with AITER and ROCm 7.0: experts shuffled, linear layers not, the bias in bf16."""
    _fp8_checkpoint(model)
    for mlp in _sparse(model):
        for name in ("w13_weight", "w2_weight"):
            weight = getattr(mlp.experts, name)
            weight.data.copy_(shuffled.shuffled(weight.data))
            weight.is_shuffled = True
        bias = mlp.gate.e_score_correction_bias
        mlp.gate.e_score_correction_bias = torch.nn.Parameter(bias.bfloat16(), requires_grad=False)


def _fp8_checkpoint(model: Any) -> None:
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        if hasattr(attention, "q_b_proj"):
            for part in (attention.fused_qkv_a_proj_with_mqa, attention.q_b_proj, attention.o_proj):
                _in_blocks(part, "weight")
        if hasattr(mlp, "experts"):
            _in_blocks(mlp.experts, "w13_weight")
            _in_blocks(mlp.experts, "w2_weight")
        dense = getattr(mlp, "shared_experts", None) or mlp
        if hasattr(dense, "gate_up_proj"):
            _in_blocks(dense.gate_up_proj, "weight")
            _in_blocks(dense.down_proj, "weight")


def _fp8_without_scales(model: Any) -> None:
    _in_blocks(model.model.layers[0].mlp.down_proj, "weight", scales=False)


def _fp8_shared_alone(model: Any) -> None:
    sparse = next(layer for layer in model.model.layers if getattr(layer.mlp, "shared_experts", None) is not None)
    _in_blocks(sparse.mlp.shared_experts.down_proj, "weight")


def _strided(model: Any) -> None:
    down = model.model.layers[0].mlp.down_proj
    down.weight = torch.nn.Parameter(down.weight.t().contiguous().t(), requires_grad=False)


def _misaligned(model: Any) -> None:
    query = model.model.layers[1].self_attn.q_b_proj
    moved = query.weight.new_empty(query.weight.numel() + 1)[1:].view_as(query.weight)
    query.weight = torch.nn.Parameter(moved, requires_grad=False)


def _whole_embedding(model: Any) -> None:
    embedding = model.model.embed_tokens
    embedding.weight = torch.nn.Parameter(torch.cat([embedding.weight, embedding.weight]), requires_grad=False)


def _one_layer_less(model: Any) -> None:
    model.model.layers = model.model.layers[:-1]


@contextmanager
def spoilt(model: Any, spoil: Callable[[Any], None]) -> Iterator[None]:
    """The model with other parameters or layers, for as long as the block lasts."""
    parameters = {module: dict(module._parameters) for module in model.modules()}
    layers = model.model.layers
    spoil(model)
    try:
        yield
    finally:
        model.model.layers = layers
        for module, own in parameters.items():
            module._parameters.clear()
            module._parameters.update(own)


def test_fp8_blocks_are_read_as_loaded(loaded: Any) -> None:
    geometry = checkpoint_geometry(CONFIG)
    blocks = Storage(Format.FP8)
    expected = Formats(
        latents=blocks, query=blocks, attention_output=blocks, dense_up=blocks, dense_down=blocks, shared_up=blocks,
        experts_up=blocks, down=blocks,
    )  # fmt: skip
    assert common_formats(model_layers(loaded, geometry, {})) == Formats()
    with spoilt(loaded, _fp8_checkpoint):
        assert reasons(loaded) == []
        layers = model_layers(loaded, geometry, {})
        assert common_formats(layers) == expected
        down = next(layer.ffn for layer in layers if hasattr(layer.ffn, "router")).down
        experts = next(layer.mlp.experts for layer in loaded.model.layers if hasattr(layer.mlp, "experts"))
        assert down.address == experts.w2_weight.data_ptr()
        assert down.scales.data_ptr() == experts.w2_weight_scale_inv.data_ptr()


def test_quark_experts_are_read_as_loaded(loaded: Any) -> None:
    with spoilt(loaded, _quark_experts):
        assert reasons(loaded) == []
        found = common_formats(model_layers(loaded, checkpoint_geometry(CONFIG), {}))
    assert {found.experts_up, found.down, found.shared_up} == {Storage(Format.MXFP4)}


def test_what_aiter_has_shuffled_is_read_in_place_and_the_rest_copied(loaded: Any) -> None:
    copies: Copies = {}
    with spoilt(loaded, _aiter_fp8):
        assert reasons(loaded) == []
        layers = model_layers(loaded, checkpoint_geometry(CONFIG), copies)
        found = common_formats(layers)
        index, ffn = next((i, layer.ffn) for i, layer in enumerate(layers) if hasattr(layer.ffn, "router"))
        mlp = loaded.model.layers[index].mlp
        assert ffn.down.address == mlp.experts.w2_weight.data_ptr()
        assert torch.equal(ffn.bias, mlp.gate.e_score_correction_bias.float())
        in_place = mlp.shared_experts.down_proj.weight.data
    blocks, shuffled_blocks = Storage(Format.FP8), Storage(Format.FP8, Layout.SHUFFLED)
    assert (found.experts_up, found.down, found.shared_up, found.query) == (
        shuffled_blocks, shuffled_blocks, blocks, blocks,
    )  # fmt: skip
    sparse = len(_sparse(loaded))
    assert sorted({what for what, _ in copies}) == [BIAS, SHARED_DOWN] and len(copies) == 2 * sparse
    assert total_bytes(copies) == sparse * (in_place.numel() + 4 * ffn.bias.numel())
    assert torch.equal(ffn.shared.down.data.view(torch.uint8), shuffled.shuffled(in_place).view(torch.uint8))


def test_linear_layers_that_aiter_has_shuffled_are_told_by_its_mark(
    loaded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    queries = [layer.self_attn.q_b_proj for layer in loaded.model.layers if hasattr(layer.self_attn, "q_b_proj")]
    for query in queries:
        monkeypatch.setattr(query, "aiter_bpreshuffled", True, raising=False)
    with spoilt(loaded, _fp8_checkpoint):
        found = common_formats(model_layers(loaded, checkpoint_geometry(CONFIG), {}))
    assert found.query == Storage(Format.FP8, Layout.SHUFFLED)
    assert found.latents == Storage(Format.FP8)


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (_fp8, "model.layers.0.self_attn.o_proj.weight is torch.float8_e4m3fn, not torch.bfloat16"),
        (_fp8_without_scales, "model.layers.0.mlp.down_proj.weight is FP8 and has no scales"),
        (_aiter_quark_experts, "w2_weight has 4 scales a row on this rank, AITER's layout wants a multiple of 8"),
        (_fp8_shared_alone, "shared_experts.down_proj.weight is FP8 and model.layers"),
        (_strided, "model.layers.0.mlp.down_proj.weight has strides"),
        (_misaligned, "model.layers.1.self_attn.q_b_proj.weight lies at address"),
        (_whole_embedding, "model.embed_tokens.weight has shape [1024, 512], not [512, 512]"),
        (_one_layer_less, "model.layers has 2 layers, the config 3"),
    ],
)
def test_spoilt_weights_are_named(loaded: Any, spoil: Callable[[Any], None], expected: str) -> None:
    with spoilt(loaded, spoil):
        (reason,) = reasons(loaded)
    assert expected in reason
    assert reasons(loaded) == []
