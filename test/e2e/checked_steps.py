"""Checked steps in captured graphs over one loaded model: quiet while nothing is wrong, and what wrong wiring is named.

`SGLANG_AMD_MONO_CHECK=1 python -m test.e2e.checked_steps LAYERS EXPERTS SEED STEPS` draws a model of that many layers
at the real widths on the GPU, captures the checked steps of 1 to 8 rows as a server does, replays STEPS of them, then
one more for each of `tests.spoiled_records`, and prints as JSON what the check said and what a checked step takes. A
process of its own: SGLang starts once in one.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from glm53_mono.bindings import bind_pools
from glm53_mono.cli.bench_measure import fill_pools
from glm53_mono.geometry import Geometry
from glm53_mono.program.pools import Pools
from glm53_mono.upstream import bench_runner
from glm53_mono.upstream.bench_runner import MONOKERNEL, BenchRunner
from glm53_mono.upstream.running import served_step
from glm53_mono.upstream.step import attention_backends
from test.e2e.forced_steps import SERVER, WIDTHS, Requests, copies, restore
from tests.spoiled_records import SPOILS, spoiled

CONTEXTS = (2, 255, 2303, 5003, 1, 64, 2047, 4098)
"""Tokens of each row's request before the first step: on both sides of a page's end and of the border of selection."""

STRETCH = 64
"""Steps after which the requests begin anew, from the caches as they were."""

SPOILED_ROWS = 4


def run_clean(runner: BenchRunner, pools: Pools, requests: Requests, steps: int) -> dict[str, Any]:
    """Replays steps of every width in turn: the counts, and how near each kind of part came to its bound."""
    before = copies(pools)
    for step in range(steps):
        if step % STRETCH == 0:
            restore(pools, before)
        runner.run(MONOKERNEL, requests.batch(runner, step % STRETCH, WIDTHS[step % len(WIDTHS)]))
    restore(pools, before)
    torch.cuda.synchronize()
    comparisons = runner.built.check.comparisons
    worst: dict[str, list[float]] = {}
    for c in comparisons.comparisons:
        attention = "sparse" if c.layer in runner.built.launch.geometry.dsa_layers else "linear"
        measured = comparisons.worst(c.layer, c.part, c.value)
        name = f"{c.part} ({attention} layers): {c.value}"
        before_it = worst.get(name, [0.0, 0.0])
        worst[name] = [
            max(before_it[0], measured.rel),
            max(before_it[1], measured.max_abs),
            c.bound.rel,
            c.bound.max_abs,
        ]
    return {
        "counts": asdict(comparisons.counts()),
        "violations": [repr(violation) for violation in comparisons.violations(0, 8)],
        "worst": worst,
    }


def run_spoiled(runner: BenchRunner, pools: Pools, requests: Requests) -> dict[str, Any]:
    """One step with each mistake that decode steps show: what had to be named, and what was."""
    before, comparisons, found = copies(pools), runner.built.check.comparisons, {}
    for spoil in SPOILS:
        if spoil.verify:
            continue
        torch.cuda.synchronize()
        earlier = comparisons.counts().violating
        with spoiled(runner.built.launch, spoil) as layer:
            runner.run(MONOKERNEL, requests.batch(runner, 0, SPOILED_ROWS))
            torch.cuda.synchronize()
        restore(pools, before)
        named = [
            [violation.comparison.layer, violation.comparison.part, violation.comparison.value]
            for violation in comparisons.violations(earlier, comparisons.counts().violating)
        ]
        found[spoil.name] = {"expected": [[layer, spoil.part, spoil.value]], "named": named}
    return found


def step_ms(runner: BenchRunner, requests: Requests, rows: int, repeats: int = 20) -> float:
    """Median milliseconds of a checked step's replay."""
    replay = runner.prepare(MONOKERNEL, requests.batch(runner, 0, rows))
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        replay()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def main(layers: int, experts: int, seed: int, steps: int) -> None:
    """Draw, start, run, and print what was found."""
    from glm53_mono.checkpoint.config import model_config
    from glm53_mono.cli.checkpoint import checkpoint_tensors

    config = model_config(layers, experts, "full", mtp=False)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        (Path(folder) / "config.json").write_text(json.dumps(config))
        server = bench_runner.resolve(["--model-path", folder, *SERVER])
        draw = lambda: checkpoint_tensors(config, seed, "cuda")
        begun = time.perf_counter()
        runner = bench_runner.start(server, draw, lambda what: print(what, file=sys.stderr, flush=True))
        started_s = time.perf_counter() - begun
        # the graphs' warm-up runs were on empty caches: what they counted is not what is asked
        geometry = Geometry.from_config(runner.hf_config, 1)
        generator = torch.Generator("cuda").manual_seed(seed)
        runner.run(MONOKERNEL, runner.decode_batch(torch.zeros(1, dtype=torch.int64, device="cuda"), 2))
        with runner.context(MONOKERNEL):
            pools = bind_pools(attention_backends(), geometry, served_step())
        fill_pools(pools, geometry, generator)
        tokens = torch.randint(geometry.vocab, (STRETCH, len(CONTEXTS)), generator=generator, device="cuda")
        requests = Requests(tokens, CONTEXTS)
        found = {
            "clean": run_clean(runner, pools, requests, steps),
            "ms": {rows: step_ms(runner, requests, rows) for rows in (1, 8)},
            "spoiled": run_spoiled(runner, pools, requests),
            "started_s": started_s,
            "memory_gib": torch.cuda.max_memory_allocated() / 2**30,
        }
        print(json.dumps(found))
        runner.built.close()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
