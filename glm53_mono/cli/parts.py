"""What the parts of a forward read and return, and how far two implementations of them lie apart."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Protocol

import torch
from torch import Tensor

from glm53_mono.geometry import Geometry
from glm53_mono.numerics import Distance, distance
from glm53_mono.reference import index_cache
from glm53_mono.reference.state import Caches, StepInputs


@dataclass(frozen=True)
class LayerTrace:
    """What went in and out of the parts of one layer, bf16 [rows, hidden] unless noted."""

    streams_in: Tensor
    """Residual streams, [rows, streams, hidden]."""
    attn_in: Tensor
    """Attention input, after mixing and norm."""
    attn_out: Tensor
    ffn_in: Tensor
    """FFN input, after mixing and norm."""
    ffn_out: Tensor
    streams_out: Tensor
    """Residual streams [rows, streams, hidden]; after the last layer their mean, [rows, hidden]."""
    selection: Tensor | None = None
    """Positions that each row attends, int [rows, selection width], any order, -1 for none; None in a KDA layer."""
    layer_out: Tensor | None = None
    """`streams_out` of a layer that read `streams_in` alone and fed its own parts from it; None on SGLang's side."""

    def rows(self, first: int, last: int) -> LayerTrace:
        """The trace of rows `first` to `last`, which is not included."""
        parts = {part.name: getattr(self, part.name) for part in fields(self)}
        return LayerTrace(**{name: None if part is None else part[first:last] for name, part in parts.items()})


@dataclass(frozen=True)
class StepTrace:
    """One forward, part by part."""

    layers: list[LayerTrace]
    hidden: Tensor
    """After the final norm, bf16 [rows, hidden]."""
    logits: Tensor
    """bf16 [rows, vocab]."""

    def rows(self, first: int, last: int) -> StepTrace:
        """The trace of rows `first` to `last`, which is not included."""
        return StepTrace(
            [layer.rows(first, last) for layer in self.layers], self.hidden[first:last], self.logits[first:last]
        )

    def without_layers(self) -> StepTrace:
        """The same trace without `layer_out`, where whole layers are not to be compared."""
        return replace(self, layers=[replace(layer, layer_out=None) for layer in self.layers])


class StepRunner(Protocol):
    """An implementation of the step that is held against SGLang's own forward: the reference, or the kernels."""

    name: str
    where: str
    """What runs it, for the reader of a report."""
    caches: Caches
    bounds: Mapping[str, Distance]

    def step(self, inputs: StepInputs, given: StepTrace) -> StepTrace:
        """Run a decode or verify step; each part reads what SGLang's part read, so that errors do not add up.

        Args:
            inputs: the step as SGLang hands it over.
            given: SGLang's own trace of the same step.

        Returns:
            The outputs of the same parts. `caches` change as the step says.
        """
        ...

    def commit(self, inputs: StepInputs, accepted: Tensor) -> None:
        """Commit a verify step: for each request its first token and `accepted` drafts, int [requests]."""
        ...


PARTS = (
    "attention input",
    "kda",
    "sparse attention",
    "selection",
    "ffn input",
    "dense",
    "experts",
    "streams",
    "layer",
    "hidden",
    "logits",
    "conv windows",
    "recurrent state",
    "verify states",
    "verify windows",
    "latent rows",
    "pooled keys",
    "ring keys",
    "ring gates",
)
"""What is compared, in the order of a step: outputs of a layer's parts, a whole layer, the head, the caches."""


@dataclass
class PartScore:
    """Distance of one part over all comparisons: `rel` of all values together, `max_abs` of the worst comparison."""

    bound: Distance
    values: int = 0
    """Values compared."""
    error: float = 0.0
    """Sum of squared errors."""
    energy: float = 0.0
    """Sum of squared expected values."""
    max_abs: float = 0.0

    def add(self, got: Tensor, want: Tensor) -> None:
        """Take in one more comparison."""
        measured = distance(got, want)
        energy = want.double().square().sum().item()
        self.values += want.numel()
        self.energy += energy
        self.error += measured.rel**2 * (energy or want.numel())
        self.max_abs = measured.max_abs if math.isnan(measured.max_abs) else max(self.max_abs, measured.max_abs)

    @property
    def measured(self) -> Distance:
        """The distance so far, as `numerics.distance` defines it for one comparison."""
        return Distance(rel=math.sqrt(self.error / (self.energy or self.values)), max_abs=self.max_abs)

    @property
    def ok(self) -> bool:
        """Whether the part keeps to its bound."""
        return self.measured.within(self.bound)


@dataclass
class Scores:
    """The table of parts: every part with its bound and its distance so far."""

    bounds: Mapping[str, Distance]
    parts: dict[str, PartScore] = field(default_factory=dict)

    def add(self, part: str, got: Tensor, want: Tensor) -> None:
        """Compare one part's output, which must have a bound (KeyError)."""
        self.parts.setdefault(part, PartScore(self.bounds[part])).add(got, want)

    @property
    def ok(self) -> bool:
        """Whether something was compared and every part kept to its bound."""
        return bool(self.parts) and all(score.ok for score in self.parts.values())

    def failures(self) -> list[str]:
        """One line for each part that exceeds its bound."""
        return [f"{part}: {score.measured}, bound {score.bound}" for part, score in self.parts.items() if not score.ok]


def compare_steps(scores: Scores, geometry: Geometry, got: StepTrace, want: StepTrace) -> None:
    """Score every part of one forward against SGLang's."""
    for layer, (mine, right) in enumerate(zip(got.layers, want.layers, strict=True)):
        kda = geometry.is_kda(layer)
        scores.add("attention input", mine.attn_in, right.attn_in)
        scores.add("kda" if kda else "sparse attention", mine.attn_out, right.attn_out)
        if not kda:
            scores.add("selection", *_selection_masks(mine.selection, right.selection))
        scores.add("ffn input", mine.ffn_in, right.ffn_in)
        scores.add("dense" if geometry.is_dense(layer) else "experts", mine.ffn_out, right.ffn_out)
        scores.add("streams", mine.streams_out, right.streams_out)
        if mine.layer_out is not None:
            scores.add("layer", mine.layer_out, right.streams_out)
    scores.add("hidden", got.hidden, want.hidden)
    scores.add("logits", got.logits, want.logits)


def compare_caches(scores: Scores, geometry: Geometry, got: Caches, want: Caches, *, committed: bool) -> None:
    """Score every cache after a step, or after its commit.

    Args:
        scores: where the distances go, one part for each kind of cache.
        geometry: sizes of one rank.
        got: caches after our step.
        want: SGLang's pools after its own.
        committed: False between a verify step and its commit, where SGLang leaves the convolution windows undefined:
            its fused kernel keeps them and its two separate ones advance them (causal_conv1d_triton.py:785).
    """
    for (name, mine), (_, right) in zip(got.tensors(), want.tensors(), strict=True):
        kind = name.partition(".")[0]
        if not right.numel():
            # no layer of that kind, or no drafts
            continue
        if kind == "index":
            keys = (_pooled_keys(cache, geometry, want.layout) for cache in (mine, right))
            scores.add(CACHE_PARTS[kind], *keys)
        elif kind != "conv" or committed:
            scores.add(CACHE_PARTS[kind], mine, right)


CACHE_PARTS = {
    "conv": "conv windows",
    "temporal": "recurrent state",
    "intermediate_ssm": "verify states",
    "intermediate_conv": "verify windows",
    "latent": "latent rows",
    "index": "pooled keys",
    "ring_key": "ring keys",
    "ring_gate": "ring gates",
}
"""What the table calls each field of `Caches`."""


def _pooled_keys(cache: Tensor, geometry: Geometry, layout: index_cache.KeyLayout) -> Tensor:
    """All keys of an index cache times their scales, fp32 [pools, index_head_dim]."""
    pages = torch.arange(cache.shape[0]).repeat_interleave(geometry.page_pools)
    entries = torch.arange(geometry.page_pools).repeat(cache.shape[0])
    keys, scales = index_cache.read(cache, pages, entries, geometry, layout)
    return keys.float() * scales[:, None]


def _selection_masks(got: Tensor | None, want: Tensor | None) -> tuple[Tensor, Tensor]:
    """Two selections as masks over positions, so that neither order nor padding counts."""
    if got is None or want is None:
        raise ValueError("a sparse attention layer without a selection cannot be compared")
    positions = int(max(got.max(), want.max())) + 1
    return _mask(got, positions), _mask(want, positions)


def _mask(selection: Tensor, positions: int) -> Tensor:
    counts = torch.zeros(selection.shape[0], positions + 1)
    return counts.scatter_add_(1, selection.long() % (positions + 1), torch.ones(selection.shape))[:, :positions]
