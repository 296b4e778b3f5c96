"""A model as SGLang has loaded it passes the model check, and each way of spoiling its weights is named."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.oracle.sglang_cpu import context

context.prepare_environment()

from glm53_mono.cli.checkpoint import checkpoint_tensors
from glm53_mono.spec import SPEC
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


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (_fp8, "model.layers.0.self_attn.o_proj.weight is torch.float8_e4m3fn, not torch.bfloat16"),
        (_strided, "model.layers.0.mlp.down_proj.weight has strides"),
        (_misaligned, "model.layers.1.self_attn.q_b_proj.weight lies at address"),
        (_whole_embedding, "model.embed_tokens.weight has shape [1024, 512], not [512, 512]"),
        (_one_layer_less, "model.layers has 2 layers, the config 3"),
    ],
)
def test_spoilt_weights_are_named(loaded: Any, spoil: Callable[[Any], None], expected: str) -> None:
    saved = dict(loaded.named_modules())
    parameters = {name: dict(module._parameters) for name, module in saved.items()}
    layers = loaded.model.layers
    spoil(loaded)
    try:
        (reason,) = reasons(loaded)
    finally:
        loaded.model.layers = layers
        for name, module in saved.items():
            module._parameters.update(parameters[name])
    assert expected in reason
    assert reasons(loaded) == []
