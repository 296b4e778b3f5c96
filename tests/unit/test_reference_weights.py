"""Reading a checkpoint: every tensor is used, in SGLang's dtypes, and what does not fit is refused by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from glm53_mono.checkpoint.config import checkpoint_geometry, model_config
from glm53_mono.cli.checkpoint import checkpoint_tensors
from glm53_mono.reference.weights import (
    PREFIX,
    CheckpointError,
    from_checkpoint,
    fuse_shared_expert,
)
from glm53_mono.weights.model import KdaWeights, MoeWeights
from tests.unit.reference_serving import TINY

CONFIG = model_config(5, 6, TINY, mtp=False)
GEOMETRY = checkpoint_geometry(CONFIG)


@pytest.fixture(scope="module")
def tensors(pytestconfig: pytest.Config) -> dict[str, Tensor]:
    return dict(checkpoint_tensors(CONFIG, pytestconfig.option.seed))


class Recorder(Mapping[str, Tensor]):
    """A mapping that knows which of its entries were read."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> Tensor:
        self.read.add(name)
        return self.tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def __contains__(self, name: object) -> bool:
        return name in self.tensors


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, tuple):
        for item in value:
            yield from leaves(item, name)
    elif is_dataclass(value):
        for field in fields(value):
            yield from leaves(getattr(value, field.name), field.name)


def test_every_tensor_is_read(tensors: dict[str, Tensor]) -> None:
    recorder = Recorder(tensors)
    from_checkpoint(recorder, GEOMETRY)
    assert recorder.read == set(tensors)


def test_dtypes_are_sglangs(tensors: dict[str, Tensor]) -> None:
    fp32 = {"fn", "scale", "base", "taps", "a_log", "dt_bias", "bias"}
    fp32 |= {"key_norm_weight", "key_norm_bias", "head_weights", "position_bias"}
    found = {name: tensor.dtype for name, tensor in leaves(from_checkpoint(tensors, GEOMETRY))}
    assert found == {name: torch.float32 if name in fp32 else torch.bfloat16 for name in found}


def test_joined_tensors_keep_their_order(tensors: dict[str, Tensor]) -> None:
    weights = from_checkpoint(tensors, GEOMETRY)
    kda, moe = weights.layers[0].attention, weights.layers[3].ffn
    assert isinstance(kda, KdaWeights) and isinstance(moe, MoeWeights)
    keys = slice(GEOMETRY.kda_width, 2 * GEOMETRY.kda_width)
    attention, ffn = PREFIX + "layers.0.self_attn.", PREFIX + "layers.3.mlp."
    assert torch.equal(kda.qkv[keys], tensors[attention + "k_proj.weight"])
    assert torch.equal(kda.taps[keys], tensors[attention + "k_conv1d.weight"][:, 0].float())
    assert torch.equal(moe.gate_up[4, GEOMETRY.expert_width :], tensors[ffn + "experts.4.up_proj.weight"])


def test_fused_shared_expert_is_the_last_row(tensors: dict[str, Tensor]) -> None:
    moe = from_checkpoint(tensors, GEOMETRY).layers[3].ffn
    assert isinstance(moe, MoeWeights) and moe.shared is not None
    fused = fuse_shared_expert(moe)
    assert torch.equal(fused.down[GEOMETRY.experts], moe.shared.down)
    assert torch.equal(fused.gate_up[: GEOMETRY.experts], moe.gate_up)
    with pytest.raises(ValueError, match="fused already"):
        fuse_shared_expert(fused)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        (PREFIX + "layers.3.mlp.gate.weight", None, "has no tensor .*layers.3.mlp.gate.weight"),
        (
            "lm_head.weight",
            torch.zeros(3, 128),
            r"lm_head.weight has shape \(3, 128\), the geometry wants \(512, 128\)",
        ),
    ],
)
def test_a_wrong_tensor_is_named(tensors: dict[str, Tensor], name: str, tensor: Tensor | None, message: str) -> None:
    wrong = {key: value for key, value in tensors.items() if key != name}
    if tensor is not None:
        wrong[name] = tensor
    with pytest.raises(CheckpointError, match=message):
        from_checkpoint(wrong, GEOMETRY)


def test_a_sharded_geometry_is_refused(tensors: dict[str, Tensor]) -> None:
    with pytest.raises(CheckpointError, match="tp_size is 2, it must be 1"):
        from_checkpoint(tensors, replace(GEOMETRY, tp_size=2))
