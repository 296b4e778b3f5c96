"""The records and descriptors of weights: each matrix described in place, once, and refused by its name."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from glm53_mono.checkpoint.config import checkpoint_geometry, model_config
from glm53_mono.cli.checkpoint import checkpoint_tensors
from glm53_mono.reference.weights import from_checkpoint
from glm53_mono.weights import bf16
from glm53_mono.weights.descriptor import Format, Layout, Matrix, WeightError
from glm53_mono.weights.model import MlaWeights, ModelWeights, with_matrices
from tests.unit.reference_serving import TINY

CONFIG = model_config(5, 6, TINY, mtp=False)
GEOMETRY = checkpoint_geometry(CONFIG)


@pytest.fixture(scope="module")
def weights(pytestconfig: pytest.Config) -> ModelWeights[torch.Tensor]:
    return from_checkpoint(dict(checkpoint_tensors(CONFIG, pytestconfig.option.seed)), GEOMETRY)


def test_matrices_are_described_where_they_lie(weights: ModelWeights[torch.Tensor]) -> None:
    names: list[str] = []
    described = bf16.described(weights)
    back = with_matrices(described, lambda name, matrix: names.append(name) or matrix.data)
    assert back.head is weights.head and back.layers[4].attention_mhc.norm is weights.layers[4].attention_mhc.norm
    assert len(set(names)) == len(names)
    assert {"embedding", "layers.0.attention.qkv", "layers.3.attention.indexer.key", "layers.4.ffn.shared.down"} <= {
        *names
    }
    attention = described.layers[3].attention
    assert isinstance(attention, MlaWeights)
    key_up, own = attention.key_up, weights.layers[3].attention.key_up
    assert (key_up.rows, key_up.columns) == (GEOMETRY.latent, GEOMETRY.qk_head_dim)
    assert (key_up.address, key_up.bytes) == (own.data_ptr(), 2 * own.numel())


def test_a_matrix_of_a_stack_has_its_own_scales() -> None:
    stack = torch.arange(24, dtype=torch.uint8).view(2, 3, 4)
    scales = torch.tensor([[1.0], [2.0]])
    matrix = Matrix("experts", stack, 3, 4, Format.BF16, Layout.LINEAR, scales)
    assert matrix.bytes == 24 + 8
    last = matrix.item(-1)
    assert (last.address, last.bytes) == (matrix.address + 12, 12 + 4)
    assert last.scales.tolist() == [2.0]


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda tensor: tensor.float(), "is torch.float32, the step reads it as torch.bfloat16"),
        (lambda tensor: tensor.t().contiguous().t(), "has strides"),
        (lambda tensor: tensor.new_empty(tensor.numel() + 1)[1:].view_as(tensor), "lies at address"),
    ],
)
def test_a_matrix_that_cannot_be_read_is_named(weights: ModelWeights[torch.Tensor], spoil, says: str) -> None:
    spoilt = replace(weights.layers[2].attention, output=spoil(weights.layers[2].attention.output))
    layers = (*weights.layers[:2], replace(weights.layers[2], attention=spoilt), *weights.layers[3:])
    with pytest.raises(WeightError, match=f"layers.2.attention.output {says}"):
        bf16.described(replace(weights, layers=layers))
