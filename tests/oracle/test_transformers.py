"""A third opinion: Hugging Face's own glm5_next on the same checkpoint, as a check of structure.

Transformers runs in fp32 here, loaded by its own loader from the checkpoint that SGLang's loads too. What differs on
purpose:

- the reference rounds to bf16 where SGLang's GEMMs and norms store bf16, Transformers rounds nothing: 2e-3 to 5e-3 a
part;
- Transformers' indexer has neither the Hadamard rotation nor FP8 (a rotation of query and key alone would change no
score), so
  scores differ by FP8's error and near-ties of the top pools fall otherwise: layers are compared where every token is
  selected, and the choice itself by how much of it agrees;
- Transformers scans KDA in chunks of 64 tokens, where the reference goes token by token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from glm53_mono.checkpoint.config import checkpoint_geometry, model_config
from glm53_mono.cli.checkpoint import checkpoint_tensors, write_checkpoint
from glm53_mono.geometry import Geometry
from glm53_mono.reference import head, indexer, kda, mhc, mla, moe
from glm53_mono.reference.state import StepInputs
from glm53_mono.reference.step import LayerTrace, step
from glm53_mono.reference.weights import from_checkpoint
from glm53_mono.weights.model import ModelWeights
from tests.oracle.ops import Draw, SeededBug, assert_within, bug_cases
from tests.unit.reference_serving import TINY, Server

SEED = 12
TOKENS = 60
LAYERS = 5
"""Dense KDA three times, sparse attention with experts, KDA with experts."""
SELECT_ALL, SELECT_SOME = 64, 16
"""Values of index_topk with which every token is attended, and with which the indexer has to choose."""


@dataclass(frozen=True)
class Opinions:
    """One model twice."""

    theirs: Any
    """Transformers' Glm5NextForConditionalGeneration, fp32."""
    weights: ModelWeights
    geometry: Geometry

    def run(self) -> tuple[list[LayerTrace], Tensor, StepInputs, Server]:
        """The reference over one sequence, all of it as the drafts of a single verify step."""
        server = Server.open(self.geometry, requests=1, pages_each=1, draft_tokens=TOKENS, seed=SEED)
        ids = torch.randint(0, self.geometry.vocab, (TOKENS,), generator=Draw(SEED).generator).tolist()
        inputs = server.inputs("target_verify", [(server.requests[0], ids)])
        trace: list[LayerTrace] = []
        hidden = step(inputs, self.weights, server.caches, self.geometry, trace)
        return trace, hidden, inputs, server


@pytest.fixture(scope="module")
def opinions(tmp_path_factory: pytest.TempPathFactory) -> Opinions:
    from transformers.models.glm5_next.modeling_glm5_next import Glm5NextForConditionalGeneration

    torch.set_num_threads(1)
    config = model_config(LAYERS, 6, replace(TINY, index_topk=SELECT_ALL), mtp=False)
    directory: Path = tmp_path_factory.mktemp("transformers") / "model"
    write_checkpoint(directory, config, SEED)
    theirs, report = Glm5NextForConditionalGeneration.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    missing = [name for name in report["missing_keys"] if "visual" not in name]
    assert not missing and not report["unexpected_keys"] and not report["mismatched_keys"]
    geometry = checkpoint_geometry(config)
    weights = from_checkpoint(dict(checkpoint_tensors(config, SEED)), geometry)
    return Opinions(theirs.eval(), weights, geometry)


def _everywhere() -> Tensor:
    return torch.ones(1, TOKENS, dtype=torch.bool)


def assert_most_rows_within(name: str, found: Tensor, expected: Tensor, *, rel: float) -> None:
    """Each row's relative error bounded, but for one row in ten whose near-tie of two experts falls the other way."""
    error, size = (found.float() - expected).flatten(1).norm(dim=1), expected.flatten(1).norm(dim=1)
    beyond = (error > rel * size).sum().item()
    assert beyond <= len(found) // 10, f"{name}: {beyond} of {len(found)} rows are beyond {rel}"


@torch.no_grad()
def compare_layers(opinions: Opinions) -> None:
    """Each part and each layer on the reference's own inputs."""
    trace, *_ = opinions.run()
    for number, (layer, ours) in enumerate(zip(opinions.theirs.model.language_model.layers, trace, strict=True)):
        where = f"layer {number} "
        for name, mixer, gates, streams in (
            ("attention", layer.attn_hc, ours.attention_gates, ours.streams_in),
            ("ffn", layer.ffn_hc, ours.ffn_gates, ours.streams_between),
        ):
            post, comb, _ = mixer(streams[None].float())
            assert_within(f"{where}{name} post", gates.post, post[0], rel=1e-6, max_abs=1e-5)
            assert_within(f"{where}{name} comb", gates.comb, comb[0], rel=1e-6, max_abs=1e-5)
        attended = layer.self_attn(hidden_states=ours.attention_in[None].float(), attention_mask=_everywhere())
        attended = attended[0] if isinstance(attended, tuple) else attended
        assert_within(where + "attention", ours.attention.output, attended[0], rel=6e-3, max_abs=5e-2)
        fed = layer.mlp(ours.ffn_in[None].float())
        assert_within(where + "FFN", ours.ffn_out, fed[0], rel=6e-3, max_abs=6e-2)
        out, _ = layer(ours.streams_in[None].float(), attention_mask=_everywhere())
        assert_most_rows_within(where + "streams", ours.streams_out, out[0], rel=7e-3)


@torch.no_grad()
def compare_model(opinions: Opinions) -> None:
    """Hidden states and logits of the whole model, the roundings of five layers added up."""
    _, hidden, inputs, _ = opinions.run()
    ids = inputs.input_ids[None]
    states = opinions.theirs.model.language_model(input_ids=ids).last_hidden_state[0]
    assert_most_rows_within("hidden states", hidden, states, rel=3e-2)
    logits = head.logits(hidden, opinions.weights.head)
    assert_most_rows_within("logits", logits, opinions.theirs.lm_head(states), rel=3e-2)


@torch.no_grad()
def compare_selection(opinions: Opinions) -> None:
    """Where four pools of up to fifteen are chosen, nearly the same ones are, and the same number of tokens always."""
    trace, _, inputs, server = opinions.run()
    (layer,) = opinions.geometry.dsa_layers
    ours = trace[layer]
    assert isinstance(ours.attention, mla.Attention)
    theirs = opinions.theirs.model.language_model.layers[layer].self_attn.indexer
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(theirs, "index_topk", SELECT_SOME)
        latent = ours.attention.query_latent[None].float()
        found = theirs(ours.attention_in[None].float(), latent, _everywhere(), None)[0]
    some = replace(opinions.geometry, index_topk=SELECT_SOME)
    own = indexer.select(ours.attention.index, inputs, server.caches, 0, some)
    assert torch.equal((own >= 0).sum(1), (found >= 0).sum(1))
    agreeing = [len(set(a) & set(b) - {-1}) for a, b in zip(own.tolist(), found.tolist(), strict=True)]
    share = sum(agreeing) / (own >= 0).sum().item()
    assert share > 0.9, f"only {share:.2f} of the chosen tokens agree"


@pytest.mark.parametrize("comparison", [compare_layers, compare_model, compare_selection])
def test_reference_agrees_with_transformers(opinions: Opinions, comparison: Callable[[Opinions], None]) -> None:
    comparison(opinions)


def _comb_transposed(branch: Tensor, streams: Tensor, gate: mhc.Gates, write=mhc.write) -> Tensor:
    return write(branch, streams, replace(gate, comb=gate.comb.transpose(-1, -2)))


def _taps_newest_first(history: Tensor, inputs: Tensor, taps: Tensor, convolve=kda.convolve) -> tuple[Tensor, Tensor]:
    return convolve(history, inputs, taps.flip(-1))


def _unscaled(slots: Tensor, routed_scale: float, combine=moe.combine) -> Tensor:
    return combine(slots, 1.0)


def _own_token_dropped(pools: Tensor, length: int, geometry: Geometry, tokens=indexer.selected_tokens) -> Tensor:
    """Without the tail's last token, the row's own."""
    chosen = tokens(pools, length, geometry)
    return chosen[:-1] if length % geometry.pool else chosen


def _lowest_pools(scores: Tensor, visible: int, most: int) -> Tensor:
    return torch.arange(min(visible, most))


SEEDED_BUGS = [
    SeededBug("comb transposed", mhc, "write", _comb_transposed, compare_layers),
    SeededBug("tap order reversed", kda, "convolve", _taps_newest_first, compare_layers),
    SeededBug("routed scale dropped", moe, "combine", _unscaled, compare_model),
    SeededBug("own token not attended", indexer, "selected_tokens", _own_token_dropped, compare_layers),
    SeededBug("pools taken by age", indexer, "best_pools", _lowest_pools, compare_selection),
]


@bug_cases(SEEDED_BUGS)
def test_seeded_bug_is_seen(opinions: Opinions, bug: SeededBug, monkeypatch: pytest.MonkeyPatch) -> None:
    replace(bug, comparison=lambda: bug.comparison(opinions)).assert_seen(monkeypatch)
