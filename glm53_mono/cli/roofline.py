"""What a decode step should take on a device, by arithmetic: its bytes at the copy bandwidth, and a price a phase.

The price of a phase is what is left of the H200's measurements (docs/measurements.md) once the bytes are paid: the
barrier, and the weight stream that runs dry and fills again. At 1 and at 8 rows it comes out alike, so it is taken as
one number. A prediction, and never reported as anything else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from rich.table import Table

from glm53_mono.cli.step_bytes import scored_pools, step_bytes
from glm53_mono.geometry import Geometry
from glm53_mono.isa.published import shape_weights
from glm53_mono.kernels.record import Kind
from glm53_mono.program.pools import Pools
from glm53_mono.program.step import step_phases
from glm53_mono.weights.descriptor import Matrix
from glm53_mono.weights.model import StepWeights, with_matrices
from glm53_mono.weights.published import CHECKPOINTS

PHASE_US = 6.7
"""Microseconds that a phase of the H200's launch takes beside its bytes, over all phases of a step."""


@dataclass(frozen=True)
class Device:
    """One GPU.

    Attributes:
        isa: a key of ISAS.
        copy_tbs: bytes that a copy reads and writes in a second, 10^12.
        phase_us: lowest and highest price of a phase, microseconds.
        assumptions: where the numbers come from, a line each.
    """

    isa: str
    copy_tbs: float
    phase_us: tuple[float, float]
    assumptions: tuple[str, ...]


H200_PEAK_TBS, H200_COPY_TBS, MI355X_PEAK_TBS = 4.8, 4.25, 8.0

DEVICES: Mapping[str, Device] = {
    "h200": Device(
        "sm_90",
        H200_COPY_TBS,
        (PHASE_US, PHASE_US),
        ("copy bandwidth and price of a phase as measured on it (TP 1, bf16)",),
    ),
    "mi355x": Device(
        "gfx950",
        MI355X_PEAK_TBS * H200_COPY_TBS / H200_PEAK_TBS,
        (PHASE_US, 2 * PHASE_US),
        (
            f"a copy reaches the same part of the peak ({MI355X_PEAK_TBS} TB/s) as on an H200",
            "a phase costs between once and twice what it does on an H200, barrier included: nobody has timed this one",
        ),
    ),
}

ASSUMPTIONS = (
    "a router chooses every expert equally often",
    "with ranks, two sums over them a layer and one of the embedding cost a phase each",
)
"""Of every device."""

WHOLE = ("router", "query_latent", "indexer", "decay_down", "gate_down")
"""Parts of matrices' names that every rank holds whole; the others are cut among the ranks."""


@dataclass(frozen=True)
class Prediction:
    """One step's time.

    Attributes:
        gigabytes: that a rank reads, and the states that it writes.
        phases: of the launch; with ranks two reductions a layer and one of the embedding are among them.
        floor_ms: the bytes alone.
        ms: lowest and highest.
    """

    rows: int
    context: int
    gigabytes: float
    phases: int
    floor_ms: float
    ms: tuple[float, float]


def predict(
    device: Device, config: dict[str, Any], rows: Sequence[int], contexts: Sequence[int], tp_size: int, weights: str
) -> list[Prediction]:
    """Predicts decode steps, for each number of rows and each context.

    Args:
        config: the contents of config.json, as `checkpoint.config.model_config` gives them.
        rows: requests of a step.
        contexts: tokens of each request.
        tp_size: ranks.
        weights: a key of CHECKPOINTS.

    Raises:
        glm53_mono.geometry.GeometryError: sizes that the ranks cannot share.
    """
    geometry = Geometry.from_config(SimpleNamespace(**config["text_config"]), tp_size)
    # shapes of as many experts as a row chooses stand for all: a tensor for each of 288 in 42 layers takes seconds
    few = config | {"text_config": config["text_config"] | {"n_routed_experts": geometry.experts_per_token}}
    whole = shape_weights(few, shared_fused=False, formats=CHECKPOINTS[weights])
    kinds = [phase.kind for phase in step_phases(geometry, whole, Pools.missing(geometry))]
    rank = _of_rank(whole, geometry)
    return [_step(device, geometry, rank, kinds, count, context) for count in rows for context in contexts]


def distinct_experts(experts: int, chosen: int, rows: int) -> float:
    """Experts of a layer that some row chose, where every choice is as likely as any other."""
    return experts * (1 - (1 - chosen / experts) ** rows)


def _step(
    device: Device, geometry: Geometry, weights: StepWeights[Matrix], kinds: Sequence[Kind], rows: int, context: int
) -> Prediction:
    sparse = geometry.layers - geometry.dense_layers
    touched = distinct_experts(geometry.experts, geometry.experts_per_token, rows)
    total = step_bytes(geometry, weights, [context] * rows, [round(touched)] * sparse).total
    phases = len(kinds) - (0 if scored_pools(geometry, context) else kinds.count(Kind.MLA_SELECT))
    floor_ms = total / device.copy_tbs / 1e9
    low, high = (floor_ms + phases * price / 1e3 for price in device.phase_us)
    return Prediction(rows, context, total / 1e9, phases, floor_ms, (low, high))


def _of_rank(weights: StepWeights[Matrix], geometry: Geometry) -> StepWeights[Matrix]:
    """The weights with as many bytes as one rank holds of them; their shapes mean nothing any more."""

    def sized(path: str, matrix: Matrix) -> Matrix:
        shards = 1 if any(each in path for each in WHOLE) else geometry.tp_size
        stack = matrix.data.shape[0] if matrix.data.dim() == 3 else 1
        size = matrix.bytes // stack
        if stack > 1 and ".ffn." in path:
            stack = geometry.experts
        if path.endswith(".router"):
            size = geometry.experts * geometry.hidden * matrix.data.element_size()
        data = torch.empty((stack, size // shards), dtype=torch.uint8, device="meta")
        return replace(matrix, data=data, scales=None)

    return with_matrices(weights, sized)


def table(device: str, predictions: Sequence[Prediction], tp_size: int, weights: str) -> Table:
    """The predictions of one device as a table that says what they are."""
    shown = Table(title=f"PREDICTED, not measured: decode steps on {device}, TP {tp_size}, {weights}")
    shown.title_justify = "left"
    for column in ("rows", "context", "GB a rank", "phases", "ms of its bytes", "ms"):
        shown.add_column(column, justify="right")
    for each in predictions:
        low, high = each.ms
        time = f"{low:.2f}" if low == high else f"{low:.2f} to {high:.2f}"
        numbers = (each.rows, each.context, f"{each.gigabytes:.1f}", each.phases, f"{each.floor_ms:.2f}", time)
        shown.add_row(*map(str, numbers))
    return shown
