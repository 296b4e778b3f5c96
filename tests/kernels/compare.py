"""A launch against the reference, part by part, each part of the reference reading what the kernels' part read.

So errors do not add up, and each part is held to its own bound. That goes for choices too: experts and pools are chosen
from the kernel's own scores, which are compared by themselves, so a near-tie decides nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from glm53_mono.kernels.monokernel import StepSizes, StepTensors
from glm53_mono.kernels.record import Kind
from glm53_mono.numerics import BOUNDS, Distance, distance
from glm53_mono.program.launch import Launch
from glm53_mono.reference import dense, head, index_cache, indexer, kda, mhc, mla, moe, numerics
from glm53_mono.reference.norm import rms_norm
from glm53_mono.reference.state import PADDED_LOCATION, Caches, StepInputs
from glm53_mono.weights.model import DenseWeights, IndexerWeights, KdaWeights, LayerWeights, MlaWeights, MoeWeights
from tests.kernels import rig

SAME = Distance(0.0, 0.0)
OTHER = Distance(math.inf, math.inf)


@dataclass(frozen=True)
class Finding:
    """How far one output of one layer is from the reference's, and how far it may be."""

    layer: int
    part: str
    output: str
    found: Distance
    bound: Distance

    @property
    def is_within(self) -> bool:
        return self.found.within(self.bound)


@dataclass
class Report:
    """Everything that was compared in one step."""

    bounds: Mapping[tuple[str, str], Distance]
    """Instead of those of `numerics.BOUNDS`, where the interpreter's exact sums allow less."""
    findings: list[Finding] = field(default_factory=list)

    def add(self, layer: int, part: str, output: str, actual: Tensor, expected: Tensor) -> None:
        """Measures one output."""
        if expected.numel():
            bound = self.bounds.get((part, output), BOUNDS[part, output])
            self.findings.append(Finding(layer, part, output, distance(actual, expected), bound))

    def add_bits(self, layer: int, part: str, output: str, *, are_same: bool) -> None:
        """Notes whether something that must be equal bit for bit is."""
        self.findings.append(Finding(layer, part, output, SAME if are_same else OTHER, SAME))

    @property
    def failures(self) -> list[Finding]:
        return [finding for finding in self.findings if not finding.is_within]

    def assert_right(self) -> None:
        assert not self.failures, "\n".join(map(str, self.failures))


@dataclass
class Comparison:
    """A step that runs phase by phase on the kernels, with the reference alongside."""

    model: rig.Model
    caches: Caches
    inputs: StepInputs
    launch: Launch
    step: tuple[StepTensors, StepSizes]
    hidden: Tensor
    report: Report
    stops_at_failure: bool = False

    @classmethod
    def prepare(cls, model: rig.Model, caches: Caches, inputs: StepInputs, *, backend: str = "interp") -> Comparison:
        """A launch over these caches on a poisoned workspace."""
        hidden = torch.full((inputs.rows, model.geometry.hidden), float("nan"), dtype=torch.bfloat16)
        return cls(
            model,
            caches,
            inputs,
            rig.prepare_launch(model, caches, inputs, backend=backend),
            rig.step_of(inputs, rig.pools_of(caches)),
            hidden.to(inputs.input_ids.device),
            Report(INTERPRETER_BOUNDS if backend == "interp" else {}),
        )

    @property
    def live(self) -> Tensor:
        """Rows of requests that are not padding."""
        return self.inputs.linear_active[self.inputs.row_requests].nonzero().flatten()

    def view(self, name: str) -> Tensor:
        return self.launch.view(name)

    def flat(self, name: str, width: int) -> Tensor:
        """A region that layers of other widths use too, as this one does: bf16 [rows, width]."""
        return self.view(name).flatten()[: self.inputs.rows * width].view(self.inputs.rows, width)

    def run(self, phases: range) -> None:
        for phase in phases:
            self.launch.run(*self.step, self.hidden, phase, phase + 1)

    def whole_step(self) -> Report:
        """Every layer, and the final norm."""
        kinds = [phase.kind for phase in self.launch.phases]
        mixes = [i for i, kind in enumerate(kinds) if kind == Kind.MIX]
        self.run(range(mixes[0]))
        ids = self.inputs.input_ids.clamp(0, self.model.geometry.vocab - 1)
        expected = mhc.expand(self.model.weights.embedding[ids], self.model.geometry.streams)
        embedded = torch.equal(self.view("streams")[self.live], expected[self.live])
        self.report.add_bits(-1, "embedding", "streams", are_same=embedded)
        for branch, (first, last) in enumerate(zip(mixes, [*mixes[1:], len(kinds) - 1], strict=True)):
            layer, is_ffn = divmod(branch, 2)
            streams, before = self.view("streams")[: self.inputs.rows].clone(), self.caches.clone()
            self.run(range(first, last))
            weights = self.model.weights.layers[layer]
            gates = self._mix(layer, streams, weights, is_ffn=bool(is_ffn))
            mixed = self.view("mixed")[: self.inputs.rows].clone()
            if is_ffn:
                part, output = self._ffn(layer, mixed, weights.ffn)
            elif isinstance(weights.attention, KdaWeights):
                part, output = "kda", self._kda(layer, mixed, weights.attention, before)
            else:
                part, output = "mla", self._mla(layer, mixed, weights.attention, before)
            expected = mhc.write(output, streams, gates)
            self.report.add(layer, part, "output", self.view("streams")[self.live], expected[self.live])
            if self.stops_at_failure and self.report.failures:
                return self.report
        self.run(range(len(kinds) - 1, len(kinds)))
        streams = self.view("streams")[: self.inputs.rows]
        expected = head.hidden_states(streams, self.model.weights.norm, self.model.geometry)
        self.report.add(layer, "head", "hidden", self.hidden[self.live], expected[self.live])
        return self.report

    def _mix(self, layer: int, streams: Tensor, weights: LayerWeights, *, is_ffn: bool) -> mhc.Gates:
        geometry, live = self.model.geometry, self.live
        own = weights.ffn_mhc if is_ffn else weights.attention_mhc
        gates = mhc.gates(mhc.mix(streams, own.fn, geometry.rms_eps), own, geometry)
        x = rms_norm(mhc.read(streams, gates.pre), own.norm, geometry.rms_eps)
        n = geometry.streams
        coefficients = self.view("coefficients")[live]
        self.report.add(layer, "mhc", "layer_input", self.view("mixed")[live], x[live])
        self.report.add(layer, "mhc", "post", coefficients[:, :n], gates.post[live])
        self.report.add(layer, "mhc", "comb", coefficients[:, n : n + n * n], gates.comb[live].flatten(1))
        return gates

    def _ffn(self, layer: int, x: Tensor, weights: DenseWeights | MoeWeights) -> tuple[str, Tensor]:
        geometry = self.model.geometry
        if isinstance(weights, DenseWeights):
            return "dense", dense.ffn(x, weights, geometry.swiglu_limit)
        logits = self.view("router").sum(0)[: self.inputs.rows]
        expected = numerics.linear_fp32(x, weights.router)
        self.report.add(layer, "router", "logits", logits[self.live], expected[self.live])
        ids, shares = moe.route(logits, weights.bias, geometry.experts_per_token)
        if weights.shared is None:
            ids, shares = moe.append_shared(ids, shares, geometry.experts, geometry.routed_scale)
        slots = moe.expert_outputs(x, ids, shares, weights, geometry.swiglu_limit)
        output = moe.combine(slots, geometry.routed_scale)
        if weights.shared is not None:
            output = output + dense.ffn(x, weights.shared, geometry.swiglu_limit)
        return "experts", output

    def _kda(self, layer: int, x: Tensor, weights: KdaWeights, before: Caches) -> Tensor:
        geometry, after = self.model.geometry, before.clone()
        expected = kda.attention(x, self.inputs, after, geometry.kda_layers.index(layer), weights, geometry)
        attended = self.flat("attended", geometry.kda_width)
        self.report.add(layer, "kda", "output", attended[self.live], expected.normalised[self.live])
        self._compare_caches(layer, before, after)
        return expected.output

    def _mla(self, layer: int, x: Tensor, weights: MlaWeights, before: Caches) -> Tensor:
        """The reference's stages one by one, so that its attention reads the tokens that the kernel chose."""
        geometry, live, after = self.model.geometry, self.live, before.clone()
        ordinal = geometry.dsa_layers.index(layer)
        query_latent, latent = mla.latents(x, weights, geometry)
        written = self.inputs.out_cache_loc != PADDED_LOCATION
        after.latent[ordinal][self.inputs.out_cache_loc[written], 0] = latent[written]
        index = indexer.project(x, query_latent, weights.indexer, geometry)
        indexer.update(index, self.inputs, after, ordinal, weights.indexer, geometry)
        self._compare_caches(layer, before, after)

        selection = self._compare_selection(layer, ordinal, x, index, weights.indexer)
        query = mla.absorbed_query(query_latent, weights, geometry)
        self.report.add(layer, "mla", "query", self.view("absorbed")[live], query[live])
        slots = mla.token_slots(selection, self.inputs)
        scale = geometry.qk_head_dim**-0.5
        mixed = mla.sparse_attention(query, after.latent[ordinal], slots, scale, round_probabilities=True)
        value = mla.values(mixed, weights)
        attended = self.flat("attended", geometry.mla_heads * geometry.v_head_dim)
        self.report.add(layer, "mla", "attention", attended[live], value[live])
        return numerics.linear(value, weights.output)

    def _compare_selection(
        self, layer: int, ordinal: int, x: Tensor, index: indexer.Projections, weights: IndexerWeights
    ) -> Tensor:
        """Positions that each row attends on the kernels, [rows, selection width] i64, -1 behind the last.

        The scores are the reference's of the kernel's own queries, and the choice is the best of the kernel's scores.
        """
        geometry, rows = self.model.geometry, self.inputs.rows
        projected = self.view("head_weights")[:rows]
        expected = numerics.linear_fp32(x, weights.head_weights)
        self.report.add(layer, "indexer", "weights", projected[self.live], expected[self.live])
        query, scale = numerics.quantise_fp8(numerics.hadamard(self.view("index_query")[:rows]))
        dequantised = [q.float() * s[..., None] for q, s in ((query, scale), (index.query, index.query_scale))]
        self.report.add(layer, "indexer", "query", dequantised[0][self.live], dequantised[1][self.live])
        head_weights = projected * geometry.index_heads**-0.5 * scale * geometry.index_head_dim**-0.5

        lengths, chosen = self.inputs.row_lengths.tolist(), [x.new_empty(0, dtype=torch.int64)] * rows
        for row in self.live.tolist():
            visible = lengths[row] // geometry.pool
            pools = torch.arange(visible, device=x.device)
            if visible > geometry.selected_pools:
                scores = self.view("scores")[row, :visible]
                request = int(self.inputs.req_pool_indices[row // self.inputs.tokens_per_request])
                pages, entries = index_cache.locate(pools, self.inputs.req_to_token[request], geometry)
                cache = self.caches.index[ordinal]
                keys, scales = index_cache.read(cache, pages, entries, geometry, self.caches.layout)
                own = slice(row, row + 1)
                rightly = indexer.score(query[own], head_weights[own], keys, scales)[0]
                self.report.add(layer, "indexer", "score", scores, rightly)
                pools = self.view("selected")[row].long()
                best = indexer.best_pools(scores, visible, geometry.selected_pools)
                self.report.add_bits(layer, "indexer", "selection", are_same=torch.equal(pools, best))
            chosen[row] = indexer.selected_tokens(pools, lengths[row], geometry)
        return numerics.stack_rows(chosen, geometry.selection_width, -1)

    def _compare_caches(self, layer: int, before: Caches, expected: Caches) -> None:
        """Entries that the reference wrote are within bounds; every other one keeps its bits."""
        geometry = self.model.geometry
        triples = zip(self.caches.tensors(), before.tensors(), expected.tensors(), strict=True)
        for (name, actual), (_, old), (_, new) in triples:
            if not new.numel():
                continue
            kind = name.partition(".")[0]
            if kind == "index":
                found, was, must_be = (
                    index_entries(cache, geometry, self.caches.layout) for cache in (actual, old, new)
                )
                written = (must_be != was).any(-1)
                self.report.add(layer, "indexer", "key", pooled_keys(found[written]), pooled_keys(must_be[written]))
            else:
                found, was, must_be = bits(actual), bits(old), bits(new)
                written = (must_be != was).any(-1)
                self.report.add(layer, *CACHE_BOUNDS[kind], actual[written], new[written])
            strayed = ((found != was) & ~written[..., None]).any()
            self.report.add_bits(layer, kind, "untouched", are_same=not strayed)


INTERPRETER_BOUNDS = {
    key: Distance(bound.rel / 3, bound.max_abs)
    for key, bound in BOUNDS.items()
    if key not in {("kda", "output"), ("mla", "attention"), ("mla", "output"), ("indexer", "query"), ("indexer", "key")}
}
"""The interpreter adds products nearly as the reference does: few values fall on another side of a rounding border. But
the gated norm blows up the error of a head whose output nearly cancels, the kernel rounds probabilities against each
chunk's maximum, and one fp8 value is worth many."""

CACHE_BOUNDS = {
    "conv": ("kda", "window"),
    "temporal": ("kda", "state"),
    "intermediate_conv": ("kda", "window"),
    "intermediate_ssm": ("kda", "state"),
    "latent": ("mla", "latent"),
    "ring_key": ("indexer", "ring"),
    "ring_gate": ("indexer", "ring"),
}


def bits(tensor: Tensor) -> Tensor:
    """The tensor's bit patterns, so that NaN equals itself."""
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])


def index_entries(cache: Tensor, geometry: rig.Geometry, layout: str) -> Tensor:
    """A page's pools one by one, key bytes and scale bytes: uint8 [pages, pools, 132]."""
    entries = torch.arange(geometry.page_pools, device=cache.device)
    offsets = torch.cat(
        (index_cache.key_offsets(entries, geometry, layout), index_cache.scale_offsets(entries, geometry)), -1
    )
    return cache[:, offsets]


def pooled_keys(entries: Tensor) -> Tensor:
    """Key bytes times their scales, uint8 [..., 132] to fp32 [..., 128]."""
    keys, scales = entries.split((entries.shape[-1] - index_cache.SCALE_BYTES, index_cache.SCALE_BYTES), -1)
    return keys.contiguous().view(torch.float8_e4m3fn).float() * scales.contiguous().view(torch.float32)


def compare_step(model: rig.Model, caches: Caches, inputs: StepInputs, *, backend: str = "interp") -> Comparison:
    """One step on the kernels and the reference, phase by phase; `caches` moves on."""
    comparison = Comparison.prepare(model, caches, inputs, backend=backend)
    comparison.whole_step()
    return comparison
