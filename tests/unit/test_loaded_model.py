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
from glm53_mono.weights import fp8
from glm53_mono.weights.descriptor import Format
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
    blocks = Format.FP8
    expected = Formats(
        latents=blocks, query=blocks, attention_output=blocks, dense_up=blocks, dense_down=blocks, shared_up=blocks,
        experts_up=blocks, down=blocks,
    )  # fmt: skip
    assert common_formats(model_layers(loaded, geometry)) == Formats()
    with spoilt(loaded, _fp8_checkpoint):
        assert reasons(loaded) == []
        layers = model_layers(loaded, geometry)
        assert common_formats(layers) == expected
        down = next(layer.ffn for layer in layers if hasattr(layer.ffn, "router")).down
        experts = next(layer.mlp.experts for layer in loaded.model.layers if hasattr(layer.mlp, "experts"))
        assert down.address == experts.w2_weight.data_ptr()
        assert down.scales.data_ptr() == experts.w2_weight_scale_inv.data_ptr()


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (_fp8, "model.layers.0.self_attn.o_proj.weight is torch.float8_e4m3fn, not torch.bfloat16"),
        (_fp8_without_scales, "model.layers.0.mlp.down_proj.weight is FP8 and has no scales"),
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
