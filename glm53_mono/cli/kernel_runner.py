"""The kernels, in Triton's interpreter, as one side of the comparison with SGLang's own forward.

Import it after `TRITON_INTERPRET=1` is set: the kernels are declared with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from glm53_mono.cli.from_reference import pools_of, step_of
from glm53_mono.cli.parts import LayerTrace, StepTrace
from glm53_mono.geometry import MAX_ROWS, Geometry
from glm53_mono.kernels import interpreter
from glm53_mono.kernels.faster_interpreter import with_room_for_frames
from glm53_mono.kernels.record import Kind
from glm53_mono.numerics import BOUNDS, TWO_ROUNDINGS, Distance
from glm53_mono.program.launch import Launch, Variant
from glm53_mono.program.step import step_phases
from glm53_mono.program.tiling import TILINGS
from glm53_mono.reference import head, indexer, mhc, numerics
from glm53_mono.reference.state import Caches, Mode, StepInputs
from glm53_mono.reference.step import commit
from glm53_mono.weights import bf16
from glm53_mono.weights.formats import common_formats
from glm53_mono.weights.model import ModelWeights

BACKEND = "interp"

DEADLINE_S = 5.0
"""Of a wait; a launch of one phase waits for nothing."""

NEAR_TIE = Distance(rel=0.25, max_abs=10.0)
"""Queries and keys are fp8: of two pools with nearly the same score a row may take the other. That is one pool in the
some dozen rows of a short run; a wrong pool in every row is at 0.7."""


class KernelRunner:
    """A `parts.StepRunner` that runs the monokernel's phases, a launch each.

    A layer starts from SGLang's streams, each of its branches reads SGLang's input, and attention reads the tokens that
    SGLang chose. What SGLang's trace does not hold is the kernels' own: the streams between the two branches, and the
    sums over the streams from which a phase leaves the next mix.
    """

    name = "kernels"
    where = "the monokernel in Triton's interpreter, one launch a phase, workspace full of NaN before each step"
    bounds: Mapping[str, Distance] = {
        "attention input": TWO_ROUNDINGS,
        "kda": BOUNDS["kda", "output"],
        "sparse attention": BOUNDS["mla", "output"],
        "selection": NEAR_TIE,
        "ffn input": TWO_ROUNDINGS,
        "dense": BOUNDS["dense", "output"],
        "experts": BOUNDS["experts", "output"],
        "streams": TWO_ROUNDINGS,
        "hidden": BOUNDS["head", "hidden"],
        "logits": BOUNDS["head", "logits"],
        "conv windows": BOUNDS["kda", "window"],
        "recurrent state": BOUNDS["kda", "state"],
        "verify states": BOUNDS["kda", "state"],
        "verify windows": BOUNDS["kda", "window"],
        "latent rows": BOUNDS["mla", "latent"],
        "pooled keys": BOUNDS["indexer", "key"],
        "ring keys": BOUNDS["indexer", "ring"],
        "ring gates": BOUNDS["indexer", "ring"],
    }
    """Those of a launch on a GPU, but for what the streams carry: the kernels' own attention and its two roundings."""

    def __init__(self, weights: ModelWeights[Tensor], caches: Caches, geometry: Geometry) -> None:
        interpreter.repair()
        self.weights = weights
        self.caches = caches
        self.geometry = geometry
        self._described = bf16.described(weights)
        self._pools = pools_of(caches)
        self._launches: dict[Mode, Launch] = {}

    def step(self, inputs: StepInputs, given: StepTrace) -> StepTrace:
        """See `parts.StepRunner.step`.

        Raises:
            ValueError: the step has more rows than a launch.
        """
        if inputs.rows > MAX_ROWS:
            raise ValueError(f"a launch has at most {MAX_ROWS} rows, not {inputs.rows}")
        if inputs.mode not in self._launches:
            self._launches[inputs.mode] = self._prepare(inputs)
        running = _RunningStep(self._launches[inputs.mode], inputs, step_of(inputs, self._pools))
        with np.errstate(over="ignore", invalid="ignore"):
            layers, hidden = with_room_for_frames(lambda: running.layers_and_hidden(given))
        return StepTrace(layers, hidden, head.logits(hidden, self.weights.head).bfloat16())

    def commit(self, inputs: StepInputs, accepted: Tensor) -> None:
        """See `parts.StepRunner.commit`; in a server SGLang copies, as the reference does here."""
        commit(self.caches, inputs, accepted)

    def _prepare(self, inputs: StepInputs) -> Launch:
        tiling = TILINGS[BACKEND]
        return Launch.prepare(
            self.geometry,
            # a program a tile of the hidden width: `branch_output` finds every tile where its program left it
            replace(tiling, programs=-(-self.geometry.hidden // tiling.output_columns)),
            Variant(
                verify=inputs.mode == "target_verify",
                index_tiled=self.caches.layout == "tiled",
                shared_fused=self._described.shared_is_fused,
                backend=BACKEND,
            ),
            step_phases(self.geometry, self._described, self._pools),
            formats=common_formats(self._described.layers),
            max_tokens=inputs.req_to_token.shape[1],
            deadline_s=DEADLINE_S,
            device="cpu",
        )


class _RunningStep:
    """One step, phase by phase, with SGLang's values put in where a part reads its input."""

    def __init__(self, launch: Launch, inputs: StepInputs, step: tuple) -> None:
        self.launch, self.inputs, self.geometry = launch, inputs, launch.geometry
        self._step = step
        self._hidden = torch.full((inputs.rows, self.geometry.hidden), float("nan"), dtype=torch.bfloat16)
        launch.poison()

    def layers_and_hidden(self, given: StepTrace) -> tuple[list[LayerTrace], Tensor]:
        """Every layer's parts, and the hidden states [rows, hidden] bf16 behind SGLang's last streams."""
        (embedding,) = self._phases(-1)
        self._run(embedding)
        layers = [self._layer(index, layer) for index, layer in enumerate(given.layers)]
        # SGLang's trace has their mean alone; four streams alike have the same
        self._rows_of("streams").copy_(given.layers[-1].streams_out[:, None].expand(-1, self.geometry.streams, -1))
        (final,) = self._phases(self.geometry.layers)
        self._run(final)
        return layers, self._hidden

    def _layer(self, index: int, given: LayerTrace) -> LayerTrace:
        phases = self._phases(index)
        ffn = max(place for place, phase in enumerate(phases) if self.launch.phases[phase].kind == Kind.MIX)
        # the first layer's are the embedding that a phase has just written, which so is compared too
        streams_in = self._rows_of("streams").clone() if index == 0 else given.streams_in
        self._rows_of("streams").copy_(streams_in)
        attn_in, selection = self._branch(phases[:ffn], given.attn_in, given.selection)
        attn_out = self._branch_output()
        ffn_in, _ = self._branch(phases[ffn:], given.ffn_in, None)
        streams_out = self._rows_of("streams").clone()
        return LayerTrace(
            streams_in=streams_in,
            attn_in=attn_in,
            attn_out=attn_out,
            ffn_in=ffn_in,
            ffn_out=self._branch_output(),
            streams_out=mhc.contract(streams_out) if index == self.geometry.layers - 1 else streams_out,
            selection=selection,
        )

    def _branch(self, phases: range, given_in: Tensor, given_selection: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Runs a branch on SGLang's input; its own input and selection."""
        self._run(phases[0])
        own_in = self._rows_of("mixed").clone()
        self._rows_of("mixed").copy_(given_in)
        selection = None
        for phase in phases[1:]:
            self._run(phase)
            if self.launch.phases[phase].kind == Kind.MLA_SELECT:
                selection = self._selection()
                self._select(given_selection)
        return own_in, selection

    def _branch_output(self) -> Tensor:
        """What a branch's last phase added to the streams, [rows, hidden] bf16: each program's one tile of columns."""
        columns = self.launch.tiling.output_columns
        tiles = self.launch.view("tile").flatten(1)[:, : MAX_ROWS * columns].unflatten(1, (MAX_ROWS, columns))
        return tiles.transpose(0, 1).flatten(1)[: self.inputs.rows, : self.geometry.hidden].clone()

    def _selection(self) -> Tensor:
        """Positions that each row attends, [rows, selection width] i64, -1 behind the last."""
        listed = self.launch.view("selected").long()
        chosen = []
        for row, length in enumerate(self.inputs.row_lengths.tolist()):
            visible = length // self.geometry.pool
            pools = listed[row] if visible > self.geometry.selected_pools else torch.arange(visible)
            chosen.append(indexer.selected_tokens(pools, length, self.geometry))
        return numerics.stack_rows(chosen, self.geometry.selection_width, -1)

    def _select(self, positions: Tensor) -> None:
        """Puts SGLang's choice in the kernels' place, in every row that must choose."""
        listed = self.launch.view("selected")
        for row, length in enumerate(self.inputs.row_lengths.tolist()):
            visible = length // self.geometry.pool
            if visible > self.geometry.selected_pools:
                own = positions[row]
                pools = own[(own >= 0) & (own < visible * self.geometry.pool)] // self.geometry.pool
                listed[row] = pools.unique().int()

    def _phases(self, layer: int) -> range:
        places = [place for place, phase in enumerate(self.launch.phases) if phase.layer == layer]
        return range(places[0], places[-1] + 1)

    def _rows_of(self, name: str) -> Tensor:
        return self.launch.view(name)[: self.inputs.rows]

    def _run(self, phase: int) -> None:
        self.launch.run(*self._step, self._hidden, phase, phase + 1)
