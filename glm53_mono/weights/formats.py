"""How each kind of matrix is stored: constants of a compiled kernel, so each of its loops reads weights in one way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import ClassVar

from glm53_mono.weights.descriptor import Matrix, Storage, WeightError
from glm53_mono.weights.model import DenseWeights, LayerWeights, MlaWeights, MoeWeights, matrices

PLAIN = Storage()
"""bf16, row by row"""


@dataclass(frozen=True)
class Formats:
    """How the matrices are stored that may be other than bf16; the same in every layer."""

    plain: ClassVar[Storage] = PLAIN
    """of all others"""

    latents: Storage = PLAIN
    index_key: Storage = PLAIN
    query: Storage = PLAIN
    index_query: Storage = PLAIN
    attention_output: Storage = PLAIN
    dense_up: Storage = PLAIN
    dense_down: Storage = PLAIN
    shared_up: Storage = PLAIN
    experts_up: Storage = PLAIN
    down: Storage = PLAIN
    """of the routed experts and of the shared one, which one loop reads"""

    def described(self) -> str:
        """One line for logs, as in `bf16 but for FP8: query; shuffled MXFP4: experts_up, down`."""
        named: dict[Storage, list[str]] = {}
        for field in fields(self):
            named.setdefault(getattr(self, field.name), []).append(field.name)
        parts = [f"{storage}: {', '.join(names)}" for storage, names in named.items() if storage != self.plain]
        return f"bf16 but for {'; '.join(parts)}" if parts else "bf16"


def common_formats(layers: tuple[LayerWeights[Matrix], ...]) -> Formats:
    """How a model's layers are stored.

    Raises:
        WeightError: a kind of matrix in two formats or layouts, or one in a format that its loop does not read.
    """
    found: dict[str, Matrix] = {}
    for name, matrix in (pair for layer in layers for pair in kinds(layer)):
        first = found.setdefault(name, matrix)
        if first.storage != matrix.storage:
            raise WeightError(
                f"{matrix.name} is {matrix.storage} and {first.name} is {first.storage}: one loop reads both, so they "
                "must be stored alike"
            )
    chosen = {id(matrix) for layer in layers for _, matrix in kinds(layer)}
    for matrix in matrices(layers):
        if id(matrix) not in chosen and matrix.storage != Formats.plain:
            raise WeightError(f"{matrix.name} is {matrix.storage}, the step reads it as {Formats.plain}")
    return Formats(**{name: matrix.storage for name, matrix in found.items()})


def kinds(layer: LayerWeights[Matrix]) -> Iterator[tuple[str, Matrix]]:
    """The layer's matrices that may be other than bf16, by the name of their field."""
    attention, ffn = layer.attention, layer.ffn
    if isinstance(attention, MlaWeights):
        yield "latents", attention.query_latent
        yield "index_key", attention.indexer.key
        yield "query", attention.query
        yield "index_query", attention.indexer.query
        yield "attention_output", attention.output
    if isinstance(ffn, DenseWeights):
        yield "dense_up", ffn.gate_up
        yield "dense_down", ffn.down
    if isinstance(ffn, MoeWeights):
        yield "experts_up", ffn.gate_up
        yield "down", ffn.down
        yield "shared_up", ffn.gate_up if ffn.shared is None else ffn.shared.gate_up
        if ffn.shared is not None:
            yield "down", ffn.shared.down
