"""The reference as one side of the comparison with SGLang's own forward."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from glm53_mono.cli.parts import PARTS, LayerTrace, StepTrace
from glm53_mono.geometry import Geometry
from glm53_mono.numerics import Distance
from glm53_mono.reference import dense, head, mhc, moe, step
from glm53_mono.reference.norm import rms_norm
from glm53_mono.reference.state import Caches, StepInputs
from glm53_mono.weights.model import LayerWeights, ModelWeights, MoeWeights

SAME = Distance(rel=0.0, max_abs=0.0)

FEW_ROUNDINGS = Distance(rel=2e-4, max_abs=5e-2)
"""The same bits, but for a few values in ten thousand that lie on a rounding border of bf16 when an exp or a sum of
fp32 differs in its last bit. One rounding too many or too few moves half of all values, and gives 1e-3."""

PASSED_ON = Distance(rel=1e-3, max_abs=1e-1)
"""The same before a norm and a projection, which spread one value over the row."""

FEW_FP8_ROUNDINGS = Distance(rel=2e-3, max_abs=0.5)
"""The same for values that are rounded to e4m3."""

STATES = Distance(rel=1e-4, max_abs=1e-1)
"""fp32 sums in another order, 1e-7, and now and then a convolution output that was rounded the other way. A state kept
in bf16 is 2e-3 away."""

NEAR_TIE = Distance(rel=5e-2, max_abs=20.0)
"""A whole layer hands its own rounding differences on: one row may choose another expert."""


class ReferenceRunner:
    """A `parts.StepRunner` in fp32 PyTorch."""

    name = "reference"
    where = "fp32 PyTorch on the CPU"
    bounds: Mapping[str, Distance] = dict.fromkeys(PARTS, FEW_ROUNDINGS) | {
        "kda": PASSED_ON,
        "sparse attention": PASSED_ON,
        "selection": SAME,
        "layer": NEAR_TIE,
        "recurrent state": STATES,
        "verify states": STATES,
        "pooled keys": FEW_FP8_ROUNDINGS,
    }

    def __init__(self, weights: ModelWeights, caches: Caches, geometry: Geometry) -> None:
        self.weights = weights
        self.caches = caches
        self.geometry = geometry

    def step(self, inputs: StepInputs, given: StepTrace) -> StepTrace:
        """See `parts.StepRunner.step`."""
        layers = [
            self._layer(index, weights, inputs, layer)
            for index, (weights, layer) in enumerate(zip(self.weights.layers, given.layers, strict=True))
        ]
        hidden = rms_norm(given.layers[-1].streams_out, self.weights.norm, self.geometry.rms_eps)
        return StepTrace(layers, hidden, head.logits(given.hidden, self.weights.head).bfloat16())

    def commit(self, inputs: StepInputs, accepted: Tensor) -> None:
        """See `parts.StepRunner.commit`."""
        step.commit(self.caches, inputs, accepted)

    def _layer(self, index: int, weights: LayerWeights, inputs: StepInputs, given: LayerTrace) -> LayerTrace:
        whole = step.layer(given.streams_in, index, inputs, weights, self.caches, self.geometry)
        between = mhc.write(given.attn_out, given.streams_in, whole.attention_gates)
        gates = mhc.gates(mhc.mix(between, weights.ffn_mhc.fn, self.geometry.rms_eps), weights.ffn_mhc, self.geometry)
        if isinstance(weights.ffn, MoeWeights):
            ffn_out = moe.ffn(given.ffn_in, weights.ffn, self.geometry).output
        else:
            ffn_out = dense.ffn(given.ffn_in, weights.ffn, self.geometry.swiglu_limit)
        last = index == self.geometry.layers - 1
        parts_out, whole_out = (
            mhc.contract(streams) if last else streams
            for streams in (mhc.write(given.ffn_out, between, gates), whole.streams_out)
        )
        return LayerTrace(
            streams_in=given.streams_in,
            attn_in=whole.attention_in,
            attn_out=whole.attention.output,
            ffn_in=rms_norm(mhc.read(between, gates.pre), weights.ffn_mhc.norm, self.geometry.rms_eps),
            ffn_out=ffn_out,
            streams_out=parts_out,
            layer_out=whole_out,
            selection=getattr(whole.attention, "selection", None),
        )
