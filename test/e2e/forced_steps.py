"""Both forwards over one loaded model, forced to the same tokens: logits step by step, and the state at the end.

`python -m test.e2e.forced_steps LAYERS EXPERTS SEED` draws a model of that many layers at the real widths on the GPU,
captures both forwards as a server does, and prints as JSON how far they are apart, beside how far SGLang's is from
itself when a request runs alone instead of in a batch, and what is out of place in the kernel's graphs. A process of
its own: SGLang starts once in one.
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

STEPS = 256
"""Steps over which a difference would have to grow if it grew."""

CONTEXTS = (1, 250, 900, 1900)
"""Tokens before the first step: a page's end and the border of selection (2,052) are crossed on the way."""

WIDTHS = tuple(range(1, 9))
"""Rows of the captured graphs."""

SERVER = (
    *("--load-format", "dummy", "--trust-remote-code", "--skip-tokenizer-init", "--tp", "1"),
    *("--kv-cache-dtype", "bfloat16", "--dsa-prefill-backend", "tilelang", "--dsa-decode-backend", "tilelang"),
    *("--cuda-graph-bs-decode", *map(str, WIDTHS), "--disable-prefill-cuda-graph", "--disable-radix-cache"),
    *("--max-running-requests", "8", "--max-mamba-cache-size", "16", "--max-total-tokens", "16384"),
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
class Outcome:
    """Attributes:
    kernel: the kernel against SGLang's forward, in one batch.
    own: SGLang's forward in a batch of one against the same request in the batch.
    """

    kernel: Apart
    own: Apart


def copies(pools: Pools) -> list[torch.Tensor]:
    """Every cache as it is now."""
    return [cache.clone() for cache in every(pools)]


def every(pools: Pools) -> list[torch.Tensor]:
    """Every cache that a decode step reads or writes."""
    return [*pools.conv, *pools.state, *pools.latent, *pools.index, *pools.ring_key, *pools.ring_gate]


def walk(
    runner: BenchRunner, arm: str, pools: Pools, before: Sequence[torch.Tensor], tokens: torch.Tensor,
    contexts: Sequence[int], longest: int,
) -> Walk:  # fmt: skip
    """Run forced steps on an arm from the caches as they were.

    Args:
        before: of `copies`.
        tokens: [steps, rows] int64, what each step is given.
        contexts: tokens of each request before the first step.
        longest: tokens of a request after the last step, or more; it decides where requests lie.
    """
    for cache, earlier in zip(every(pools), before, strict=True):
        cache.copy_(earlier)
    logits = []
    for step in range(len(tokens)):
        lengths = [context + 1 + step for context in contexts]
        batch = runner.decode_batch(tokens[step], lengths, longest=longest)
        logits.append(runner.run(arm, batch).next_token_logits.float().clone())
    with runner.context(arm):
        slots = attention_backends().linear.forward_metadata.mamba_cache_indices[: len(contexts)].long()
    return Walk(
        torch.stack(logits),
        torch.stack([state[slots].float() for state in pools.state]),
        torch.stack([window[slots].float() for window in pools.conv]),
    )


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


def only(walked: Walk, row: int) -> Walk:
    """One request of a walk."""
    own = slice(row, row + 1)
    return Walk(walked.logits[:, own], walked.state[:, own], walked.windows[:, own])


def outcome(runner: BenchRunner, pools: Pools, tokens: torch.Tensor, contexts: Sequence[int]) -> Outcome:
    """Walk three times, and compare.

    Args:
        tokens: [steps, rows] int64.
        contexts: of the rows, before the first step.

    Raises:
        BenchError: the kernel did not run every step of its own walk, or ran some of SGLang's.
    """
    before, longest = copies(pools), max(contexts) + len(tokens)
    with expect_launches(runner.built, 0):
        expected = walk(runner, SGLANG, pools, before, tokens, contexts, longest)
    with expect_launches(runner.built, len(tokens)):
        found = walk(runner, MONOKERNEL, pools, before, tokens, contexts, longest)
    # the first request stands in the same places of the pools alone as in the batch
    alone = walk(runner, SGLANG, pools, before, tokens[:, :1].contiguous(), contexts[:1], longest)
    return Outcome(apart(found, expected), apart(alone, only(expected, 0)))


def out_of_place(runner: BenchRunner) -> dict[int, list[str]]:
    """What `misplaced` finds in the kernel's graph of each captured width."""
    found, own = (
        {key.size: nodes(graph) for key, graph in runner._arms[arm].graphs.backend._graphs.items()}
        for arm in (MONOKERNEL, SGLANG)
    )
    return {rows: misplaced(found[rows], own[rows], monokernel.__name__) for rows in found}


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
                runner.capture_own_forward()
            generator = torch.Generator("cuda").manual_seed(seed)
            geometry = Geometry.from_config(runner.hf_config, 1)
            with runner.context(SGLANG):
                pools = bind_pools(attention_backends(), geometry, served_step())
            fill_pools(pools, geometry, generator)
            shape = (STEPS, len(CONTEXTS))
            tokens = torch.randint(geometry.vocab, shape, generator=generator, device="cuda")
            apart_by = asdict(outcome(runner, pools, tokens, CONTEXTS))
            print(json.dumps(apart_by | {"out of place": out_of_place(runner)}))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
