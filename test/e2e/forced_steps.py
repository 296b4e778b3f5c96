"""Both forwards over one loaded model, forced to the same tokens: logits step by step, and the state at the end.

`python -m test.e2e.forced_steps LAYERS EXPERTS SEED` draws a model of that many layers at the real widths on the GPU,
captures both forwards as a server does, and prints as JSON how far they are apart, beside how far SGLang's is from
itself when the same requests run in a crowd, and what is out of place in the kernel's graphs. A process of its own:
SGLang starts once in one.

Two comparisons. Each step by itself: both forwards start from the caches that SGLang's own steps have left, so that a
router's near-tie that fell the other way ends with its step, and is told from a mistake by the experts that both chose.
A walk: each forward goes on from its own caches, as in a server, where a near-tie stays in the state for some steps.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from glm53_mono.bindings import bind_pools
from glm53_mono.cli.bench_measure import expect_launches, fill_pools
from glm53_mono.geometry import Geometry
from glm53_mono.kernels.monokernel import monokernel
from glm53_mono.program.pools import Pools
from glm53_mono.upstream import bench_runner
from glm53_mono.upstream.bench_runner import MONOKERNEL, SGLANG, BenchRunner
from glm53_mono.upstream.running import served_step
from glm53_mono.upstream.step import attention_backends
from test.e2e.compare import Rows, compare_rows
from test.e2e.graph_nodes import kept_graphs, misplaced, nodes
from test.e2e.routing import biases_of, first_parting, kernels_routing, sglangs_choice

STEPS = 256
"""Steps over which a difference would have to grow if it grew."""

CONTEXTS = (1, 250, 900, 1900)
"""Tokens before the first step: a page's end and the border of selection (2,052) are crossed on the way."""

WIDTHS = tuple(range(1, 9))
"""Rows that the kernel serves, each with a graph of its own."""

CROWD = 64
"""Rows of another batch size: up to eight, SGLang's GEMMs sum alike and its rows are the same bit for bit."""

SERVER = (
    *("--load-format", "dummy", "--trust-remote-code", "--skip-tokenizer-init", "--tp", "1"),
    *("--kv-cache-dtype", "bfloat16", "--dsa-prefill-backend", "tilelang", "--dsa-decode-backend", "tilelang"),
    *("--cuda-graph-bs-decode", *map(str, (*WIDTHS, CROWD)), "--disable-prefill-cuda-graph", "--disable-radix-cache"),
    *("--max-running-requests", str(CROWD), "--max-mamba-cache-size", str(CROWD), "--max-total-tokens", "163840"),
    *("--context-length", "8192", "--mem-fraction-static", "0.75", "--enable-amd-monokernel"),
)


@dataclass(frozen=True)
class Walk:
    """What one arm left.

    Attributes:
        logits: [steps, rows, vocab] fp32.
        state: recurrent states of the rows' requests, [layers, rows, ...] fp32.
        windows: convolution windows likewise.
    """

    logits: torch.Tensor
    state: torch.Tensor
    windows: torch.Tensor


@dataclass(frozen=True)
class Apart:
    """How far two walks are apart.

    Attributes:
        logits: relative RMSE of each request's logits, near-ties left out.
        flips: steps of each request that fell another way at a near-tie.
        growth: of each request, the last quarter's median distance over the first quarter's.
        state: relative RMSE of each request's recurrent state after the last step.
        windows: the same of its convolution window.
    """

    logits: list[float]
    flips: list[int]
    growth: list[float]
    state: list[float]
    windows: list[float]


@dataclass(frozen=True)
class EachStep:
    """Steps from the same caches, compared with SGLang's.

    Attributes:
        overall: relative RMSE of all rows' logits.
        alike: the same of the rows whose layers all chose the same experts; 0 if there are none.
        alike_rows: how many these are.
        rows: how many there are.
        widest_gap: of the other rows, where in its first layer that chose otherwise a row was furthest from a tie, in
            standard deviations of its biased scores; None where that was not read.
    """

    overall: float
    alike: float
    alike_rows: int
    rows: int
    widest_gap: float | None


@dataclass(frozen=True)
class Outcome:
    """Attributes:
    steps: the kernel against SGLang's forward, each step by itself.
    own_steps: SGLang's forward in a crowd against the same rows in a batch of their own.
    walk: as `steps`, step after step.
    own_walk: as `own_steps`, likewise.
    """

    steps: EachStep
    own_steps: EachStep
    walk: Apart
    own_walk: Apart


@dataclass(frozen=True)
class Requests:
    """What is walked.

    Attributes:
        tokens: [steps, rows] int64, what each step is given. Rows beyond those of `contexts` are the crowd's.
        contexts: tokens of each compared request before the first step; the crowd's requests repeat them.
    """

    tokens: torch.Tensor
    contexts: Sequence[int]

    @property
    def longest(self) -> int:
        """Tokens of a request after the last step, or more; it decides where requests lie."""
        return max(self.contexts) + len(self.tokens)

    def batch(self, runner: BenchRunner, step: int, rows: int) -> Any:
        """The batch of a step's first rows."""
        lengths = [self.contexts[row % len(self.contexts)] + 1 + step for row in range(rows)]
        return runner.decode_batch(self.tokens[step, :rows].contiguous(), lengths, longest=self.longest)


def copies(pools: Pools) -> list[torch.Tensor]:
    """Every cache as it is now."""
    return [cache.clone() for cache in every(pools)]


def every(pools: Pools) -> list[torch.Tensor]:
    """Every cache that a decode step reads or writes."""
    return [*pools.conv, *pools.state, *pools.latent, *pools.index, *pools.ring_key, *pools.ring_gate]


def restore(pools: Pools, before: Sequence[torch.Tensor]) -> None:
    """Put every cache back as `copies` found it."""
    for cache, earlier in zip(every(pools), before, strict=True):
        cache.copy_(earlier)


def walk(
    runner: BenchRunner, arm: str, pools: Pools, before: Sequence[torch.Tensor], requests: Requests, rows: int
) -> Walk:
    """Run forced steps on an arm from the caches as they were.

    Args:
        before: of `copies`.
        rows: of each step; what is kept are those of the compared requests.
    """
    restore(pools, before)
    kept, logits = len(requests.contexts), []
    for step in range(len(requests.tokens)):
        batch = requests.batch(runner, step, rows)
        logits.append(runner.run(arm, batch).next_token_logits[:kept].float().clone())
    with runner.context(arm):
        slots = attention_backends().linear.forward_metadata.mamba_cache_indices[:kept].long()
    return Walk(
        torch.stack(logits),
        torch.stack([state[slots].float() for state in pools.state]),
        torch.stack([window[slots].float() for window in pools.conv]),
    )


class StepDistances:
    """Collects rows of steps that are compared with SGLang's."""

    def __init__(self) -> None:
        self._errors: list[torch.Tensor] = []
        self._lengths: list[torch.Tensor] = []
        self._apart: list[torch.Tensor] = []
        self._gaps: list[torch.Tensor] = []

    def add(
        self,
        logits: tuple[torch.Tensor, torch.Tensor],
        chosen: tuple[torch.Tensor, torch.Tensor],
        gaps: torch.Tensor | None = None,
    ) -> None:
        """A step's rows.

        Args:
            logits: [rows, vocab] found and expected.
            chosen: [layers, rows, experts] bool likewise.
            gaps: [layers, rows] of what was found.
        """
        found, expected = (values.float() for values in logits)
        self._errors.append((found - expected).norm(dim=1))
        self._lengths.append(expected.norm(dim=1))
        apart, layer = first_parting(*chosen)
        self._apart.append(apart)
        if gaps is not None:
            self._gaps.append(gaps.gather(0, layer[None])[0].masked_fill(~apart, 0.0))

    def result(self) -> EachStep:
        """Of all rows so far."""
        errors, lengths, apart = torch.cat(self._errors), torch.cat(self._lengths), torch.cat(self._apart)
        alike = ~apart
        return EachStep(
            overall=(errors.norm() / lengths.norm()).item(),
            alike=(errors[alike].norm() / lengths[alike].norm()).item() if alike.any() else 0.0,
            alike_rows=int(alike.sum()),
            rows=len(errors),
            widest_gap=torch.cat(self._gaps).max().item() if self._gaps else None,
        )


def each_step(
    runner: BenchRunner, pools: Pools, requests: Requests, sglangs: torch.Tensor, crowd: int
) -> tuple[EachStep, EachStep]:
    """Compare each step by itself; the caches go on as SGLang's own steps leave them.

    Args:
        sglangs: of `routing.sglangs_choice`, for both of SGLang's batches.
        crowd: rows of the other batch size.

    Returns:
        The kernel's distances, and those of SGLang's forward in the crowd.

    Raises:
        BenchError: the kernel did not run a step of its own, or ran one of SGLang's.
    """
    rows, biases = len(requests.contexts), biases_of(runner.model)
    kernel, own = StepDistances(), StepDistances()
    hidden = torch.empty((rows, runner.built.launch.geometry.hidden), dtype=torch.bfloat16, device=biases.device)
    before = copies(pools)
    for step in range(len(requests.tokens)):
        for cache, earlier in zip(every(pools), before, strict=True):
            earlier.copy_(cache)
        batch = requests.batch(runner, step, rows)
        with expect_launches(runner.built, 1):
            found = runner.run(MONOKERNEL, batch).next_token_logits.clone()
        restore(pools, before)
        with runner.context(MONOKERNEL):
            arguments = runner.built.arguments_of(batch)
        routing = kernels_routing(runner.built.launch, *arguments, hidden, biases)
        restore(pools, before)
        with expect_launches(runner.built, 0):
            crowded = runner.run(SGLANG, requests.batch(runner, step, crowd)).next_token_logits[:rows].clone()
            in_crowd = sglangs[:, :rows].clone()
            restore(pools, before)
            expected = runner.run(SGLANG, requests.batch(runner, step, rows)).next_token_logits
        chosen = sglangs[:, :rows].clone()
        kernel.add((found, expected), (routing.chosen, chosen), routing.gaps)
        own.add((crowded, expected), (in_crowd, chosen))
    return kernel.result(), own.result()


def apart(found: Walk, expected: Walk) -> Apart:
    """Compare two walks, request by request."""
    each: list[Rows] = [
        compare_rows(own, other) for own, other in zip(*_by_row(found, expected, "logits"), strict=True)
    ]
    return Apart(
        logits=[rows.overall for rows in each],
        flips=[rows.flips for rows in each],
        growth=[rows.growth for rows in each],
        state=[_relative(own, other) for own, other in zip(*_by_row(found, expected, "state"), strict=True)],
        windows=[_relative(own, other) for own, other in zip(*_by_row(found, expected, "windows"), strict=True)],
    )


def outcome(runner: BenchRunner, pools: Pools, requests: Requests, sglangs: torch.Tensor, crowd: int) -> Outcome:
    """Compare step by step, then walk three times.

    Args:
        sglangs: of `routing.sglangs_choice`.
        crowd: rows of the other batch size that SGLang is compared with itself in.

    Raises:
        BenchError: the kernel did not run every step of its own walk, or ran some of SGLang's.
    """
    before, rows, steps = copies(pools), len(requests.contexts), len(requests.tokens)
    each, own = each_step(runner, pools, requests, sglangs, crowd)
    with expect_launches(runner.built, 0):
        expected = walk(runner, SGLANG, pools, before, requests, rows)
    with expect_launches(runner.built, steps):
        found = walk(runner, MONOKERNEL, pools, before, requests, rows)
    crowded = walk(runner, SGLANG, pools, before, requests, crowd)
    return Outcome(each, own, apart(found, expected), apart(crowded, expected))


def out_of_place(runner: BenchRunner) -> dict[int, list[str]]:
    """What `misplaced` finds in the kernel's graph of each width that it serves."""
    found, own = (
        {key.size: nodes(graph) for key, graph in runner._arms[arm].graphs.backend._graphs.items()}
        for arm in (MONOKERNEL, SGLANG)
    )
    return {rows: misplaced(found[rows], own[rows], monokernel.__name__) for rows in WIDTHS}


def _by_row(found: Walk, expected: Walk, name: str) -> tuple[Any, Any]:
    """Values of both walks with the requests first."""
    own, other = getattr(found, name), getattr(expected, name)
    return own.transpose(0, 1), other.transpose(0, 1)


def _relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


def main(layers: int, experts: int, seed: int) -> None:
    """Draw, start, walk, and print the outcome."""
    from glm53_mono.checkpoint.config import model_config
    from glm53_mono.cli.checkpoint import checkpoint_tensors

    config = model_config(layers, experts, "full", mtp=False)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        server = bench_runner.resolve(["--model-path", folder, *SERVER])
        draw = lambda: checkpoint_tensors(config, seed, "cuda")
        with torch.no_grad():
            with kept_graphs():
                runner = bench_runner.start(server, draw, lambda what: print(what, file=sys.stderr, flush=True))
                geometry = Geometry.from_config(runner.hf_config, 1)
                with sglangs_choice(runner.model, geometry.experts, CROWD) as sglangs:
                    runner.capture_own_forward()
            generator = torch.Generator("cuda").manual_seed(seed)
            with runner.context(SGLANG):
                pools = bind_pools(attention_backends(), geometry, served_step())
            fill_pools(pools, geometry, generator)
            tokens = torch.randint(geometry.vocab, (STEPS, CROWD), generator=generator, device="cuda")
            found = asdict(outcome(runner, pools, Requests(tokens, CONTEXTS), sglangs, CROWD))
            print(json.dumps(found | {"out of place": out_of_place(runner)}))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
