"""Which experts each layer chose, as SGLang's forward and as the kernel chose them, and how near a tie that was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from glm53_mono.kernels.monokernel import StepSizes, StepTensors
from glm53_mono.kernels.record import Kind
from glm53_mono.program.launch import Launch


@dataclass(frozen=True)
class Routing:
    """A step's routing.

    Attributes:
        chosen: [layers that route, rows, experts] bool.
        gaps: [layers that route, rows] fp32: how far the least wanted of the chosen experts is ahead of the best of the
            others, in standard deviations of the row's biased scores.
    """

    chosen: torch.Tensor
    gaps: torch.Tensor


@contextmanager
def sglangs_choice(model: Any, experts: int, most_rows: int) -> Iterator[torch.Tensor]:
    """Has every forward of SGLang's that runs, or is captured, within the block leave its choice.

    Args:
        model: SGLang's, whose mixtures of experts are `Glm5NextMoE`.
        experts: routed ones; shared ones that SGLang appends are left out.
        most_rows: of a step.

    Yields:
        [layers that route, most_rows, experts] bool on the model's device: of the last forward, or the last replay of a
        graph that was captured within the block.
    """
    routers = [module for name, module in model.named_modules() if name.endswith(".mlp.topk")]
    device = next(model.parameters()).device
    # one column more for whatever is appended
    left = torch.zeros((len(routers), most_rows, experts + 1), dtype=torch.bool, device=device)

    def keep(layer: int) -> Any:
        def hook(_module: Any, _arguments: Any, output: Any) -> None:
            rows = output.topk_ids.shape[0]
            if rows <= most_rows:
                left[layer, :rows] = False
                left[layer, :rows].scatter_(1, output.topk_ids.long().clamp(max=experts), True)

        return hook

    hooks = [router.register_forward_hook(keep(layer)) for layer, router in enumerate(routers)]
    try:
        yield left[..., :experts]
    finally:
        for hook in hooks:
            hook.remove()


def kernels_routing(
    launch: Launch, tensors: StepTensors, sizes: StepSizes, hidden: torch.Tensor, biases: torch.Tensor
) -> Routing:
    """Runs a step as a launch for each phase, and reads the workspace behind each choice; changes the caches.

    Args:
        biases: [layers that route, experts] fp32, what is added to the scores before experts are chosen.
    """
    chosen, gaps, bias = [], [], iter(biases)
    for index, phase in enumerate(launch.phases):
        launch.run(tensors, sizes, hidden, index, index + 1)
        if phase.kind is not Kind.EXPERTS:
            continue
        kept = launch.view("expert_weight")[0, : sizes.rows] != 0
        scores = launch.view("router")[:, : sizes.rows].sum(0).sigmoid() + next(bias)
        least = scores.masked_fill(~kept, torch.inf).amin(1)
        best = scores.masked_fill(kept, -torch.inf).amax(1)
        chosen.append(kept)
        gaps.append((least - best) / scores.std(1))
    return Routing(torch.stack(chosen), torch.stack(gaps))


def biases_of(model: Any) -> torch.Tensor:
    """The routers' biases, [layers that route, experts] fp32."""
    gates = [module for name, module in model.named_modules() if name.endswith(".mlp.gate")]
    return torch.stack([gate.e_score_correction_bias.float() for gate in gates])


def first_parting(found: torch.Tensor, expected: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Which rows were routed apart, and where first.

    Args:
        found, expected: [layers, rows, experts] bool.

    Returns:
        [rows] bool; and the first layer in which the choices differ, [rows] int64, 0 where none does.
    """
    apart = (found != expected).any(2)
    return apart.any(0), apart.int().argmax(0)
