"""The format of each kind of matrix: constants of a compiled kernel, so each of its loops reads weights in one way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

from glm53_mono.weights.descriptor import Format, Matrix, WeightError
from glm53_mono.weights.model import DenseWeights, LayerWeights, MlaWeights, MoeWeights, matrices


@dataclass(frozen=True)
class Formats:
    """How the matrices are stored that may be other than bf16; the same in every layer."""

    latents: Format = Format.BF16
    index_key: Format = Format.BF16
    query: Format = Format.BF16
    index_query: Format = Format.BF16
    attention_output: Format = Format.BF16
    dense_up: Format = Format.BF16
    dense_down: Format = Format.BF16
    shared_up: Format = Format.BF16
    experts_up: Format = Format.BF16
    down: Format = Format.BF16
    """of the routed experts and of the shared one, which one loop reads"""

    def described(self) -> str:
        """One line for logs, as in `bf16 but for FP8: query, down`."""
        parts = []
        for kind in Format:
            names = [field.name for field in fields(self) if getattr(self, field.name) == kind]
            if kind != Format.BF16 and names:
                parts.append(f"{kind.name}: {', '.join(names)}")
        return f"bf16 but for {'; '.join(parts)}" if parts else "bf16"


def common_formats(layers: tuple[LayerWeights[Matrix], ...]) -> Formats:
    """The formats of a model's layers.

    Raises:
        WeightError: a kind of matrix in two formats, or one in a format that its loop does not read.
    """
    found: dict[str, Matrix] = {}
    for name, matrix in (pair for layer in layers for pair in _kinds(layer)):
        first = found.setdefault(name, matrix)
        if first.format != matrix.format:
            raise WeightError(
                f"{matrix.name} is {matrix.format.name} and {first.name} is {first.format.name}: one loop reads "
                "both, so they must be stored alike"
            )
    chosen = {id(matrix) for layer in layers for _, matrix in _kinds(layer)}
    for matrix in matrices(layers):
        if id(matrix) not in chosen and matrix.format != Format.BF16:
            raise WeightError(f"{matrix.name} is {matrix.format.name}, the step reads it as {Format.BF16.name}")
    return Formats(**{name: matrix.format for name, matrix in found.items()})


def _kinds(layer: LayerWeights[Matrix]) -> Iterator[tuple[str, Matrix]]:
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
