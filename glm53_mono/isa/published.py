"""A model's weights as shapes without values: enough to list the phases of a step and what each of them streams."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from glm53_mono.checkpoint.config import checkpoint_geometry
from glm53_mono.checkpoint.tensors import TensorSpec, tensor_table
from glm53_mono.geometry import FP8_BLOCK, MXFP4_BLOCK
from glm53_mono.reference.weights import from_checkpoint, fuse_shared_expert
from glm53_mono.weights.bf16 import matrix as bf16_matrix
from glm53_mono.weights.descriptor import Format, Matrix, Storage
from glm53_mono.weights.formats import Formats
from glm53_mono.weights.model import ModelWeights, MoeWeights
from glm53_mono.weights.published import with_storage


class Shapes(Mapping[str, Tensor]):
    """A checkpoint's tensors on torch's meta device, which holds no values."""

    def __init__(self, table: list[TensorSpec]) -> None:
        self._specs = {spec.name: spec for spec in table}

    def __getitem__(self, name: str) -> Tensor:
        spec = self._specs[name]
        return torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device="meta")

    def __iter__(self) -> Iterator[str]:
        return iter(self._specs)

    def __len__(self) -> int:
        return len(self._specs)


def shape_weights(config: dict[str, Any], *, shared_fused: bool, formats: Formats) -> ModelWeights[Matrix]:
    """The weights of a model, unsharded.

    Args:
        config: the contents of a bf16 checkpoint's config.json, as `checkpoint.config.model_config` gives them.
        shared_fused: whether the shared expert is one more routed one.
        formats: how its matrices are stored.
    """
    weights = from_checkpoint(Shapes(tensor_table(config)), checkpoint_geometry(config))
    if shared_fused:
        layers = tuple(
            replace(layer, ffn=fuse_shared_expert(layer.ffn)) if isinstance(layer.ffn, MoeWeights) else layer
            for layer in weights.layers
        )
        weights = replace(weights, layers=layers)
    return with_storage(weights, formats, _shape)


def _shape(name: str, tensor: Tensor, storage: Storage) -> Matrix:
    """A matrix of these sizes, stored so; without values."""
    if storage.format == Format.BF16:
        return bf16_matrix(name, tensor)
    *stack, rows, columns = tensor.shape
    if storage.format == Format.FP8:
        values = torch.empty(tensor.shape, dtype=torch.float8_e4m3fn, device="meta")
        scales = torch.empty((*stack, rows // FP8_BLOCK, columns // FP8_BLOCK), device="meta")
    else:
        values = torch.empty((*stack, rows, columns // 2), dtype=torch.uint8, device="meta")
        scales = torch.empty((*stack, rows, columns // MXFP4_BLOCK), dtype=torch.uint8, device="meta")
    return Matrix(name, values, rows, columns, storage.format, storage.layout, scales)
