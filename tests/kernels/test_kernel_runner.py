"""The demo's fast side of kernels: right against the reference's own step, red on mistakes in the kernels."""

from __future__ import annotations

import pytest
import torch

from glm53_mono.cli.kernel_runner import KernelRunner
from glm53_mono.cli.parts import LayerTrace, Scores, StepTrace, compare_caches, compare_steps
from glm53_mono.reference import head, mhc
from glm53_mono.reference.state import Caches, StepInputs
from glm53_mono.reference.step import LayerTrace as ReferenceTrace
from glm53_mono.reference.step import step
from tests.kernels import rig
from tests.kernels.rig import EVERY_PAIR, EVERY_PHASE, ONE_KDA, ONE_MLA, Model, Pattern, tiny_model
from tests.kernels.seeded_bugs import BUGS, Bug

MISTAKES = [
    ("convolution taps reversed", "kda", ONE_KDA),
    ("SwiGLU without its clamp", "experts", ONE_KDA),
    # streams that are all alike mix to the same: two layers are needed to tell
    ("comb transposed", "streams", EVERY_PHASE),
    ("tail dropped", "sparse attention", ONE_MLA),
    ("latent of the row before", "latent rows", ONE_MLA),
    ("ring entry off by one", "pooled keys", ONE_MLA),
    ("verify writes the state", "recurrent state", ONE_KDA),
]
"""Of `seeded_bugs`, the part of the table that shows it, and the layers that it takes."""


def trace_of(model: Model, caches: Caches, inputs: StepInputs) -> StepTrace:
    """What the demo gets from SGLang, here from the reference; `caches` moves on."""
    parts: list[ReferenceTrace] = []
    hidden = step(inputs, model.weights, caches, model.geometry, parts, round_probabilities=True)
    layers = [
        LayerTrace(
            streams_in=part.streams_in,
            attn_in=part.attention_in,
            attn_out=part.attention.output,
            ffn_in=part.ffn_in,
            ffn_out=part.ffn_out,
            streams_out=mhc.contract(part.streams_out) if part is parts[-1] else part.streams_out,
            selection=getattr(part.attention, "selection", None),
        )
        for part in parts
    ]
    return StepTrace(layers, hidden, head.logits(hidden, model.weights.head).bfloat16())


def scores_of(pattern: Pattern, seed: int, lengths: list[int], tokens: int, bug: Bug | None = None) -> Scores:
    """The table of parts behind one step, with a mistake in the kernels or without."""
    verify = tokens > 1
    model = tiny_model(pattern, seed=seed, sinkhorn_iterations=2)
    inputs = rig.step_inputs(model.geometry, lengths, tokens=tokens, seed=seed, max_tokens=512, verify=verify)
    pages, drafts = rig.pages_of(inputs, model.geometry), tokens if verify else 0
    caches = rig.random_caches(model.geometry, requests=len(lengths), pages=pages, seed=seed, draft_tokens=drafts)
    runner = KernelRunner(model.weights, caches.clone(), model.geometry)
    given = trace_of(model, caches, inputs)
    if bug is None:
        found = runner.step(inputs, given)
    else:
        with bug.seeded():
            found = runner.step(inputs, given)
    scores = Scores(runner.bounds)
    compare_steps(scores, model.geometry, found, given)
    compare_caches(scores, model.geometry, runner.caches, caches, committed=True)
    return scores


@pytest.mark.slow
@pytest.mark.parametrize(("lengths", "tokens"), [([5, 71, 68], 1), ([66], 4)], ids=["decode", "verify"])
def test_every_part_keeps_to_its_bound(seed: int, lengths: list[int], tokens: int) -> None:
    scores = scores_of(EVERY_PAIR, seed, lengths, tokens)
    assert not scores.failures()
    assert set(scores.parts) >= {"kda", "sparse attention", "selection", "dense", "experts", "hidden", "pooled keys"}


@pytest.mark.filterwarnings("ignore:All-NaN slice encountered")
@pytest.mark.parametrize(("mistake", "part", "pattern"), MISTAKES)
def test_a_mistake_in_the_kernels_turns_its_part_red(seed: int, mistake: str, part: str, pattern: Pattern) -> None:
    (bug,) = (bug for bug in BUGS if bug.name == mistake)
    scores = scores_of(pattern, seed, [67] if bug.verify else [68, 7], 2 if bug.verify else 1, bug)
    assert not scores.parts[part].ok


def test_more_rows_than_a_launch_has_are_refused() -> None:
    model = tiny_model(EVERY_PAIR, seed=0)
    inputs = rig.step_inputs(model.geometry, [1] * 9, tokens=1, seed=0, max_tokens=256)
    caches = rig.random_caches(model.geometry, requests=9, pages=10, seed=0)
    nothing = StepTrace([], torch.empty(0), torch.empty(0))
    with pytest.raises(ValueError, match="a launch has at most 8 rows, not 9"):
        KernelRunner(model.weights, caches, model.geometry).step(inputs, nothing)
