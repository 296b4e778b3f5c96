"""The bytes of a step, against the checkpoint's own list of tensors and sums worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest

from glm53_mono.checkpoint.config import checkpoint_geometry, model_config
from glm53_mono.checkpoint.tensors import tensor_table
from glm53_mono.cli import step_bytes as module
from glm53_mono.cli.step_bytes import StepBytes, attended_tokens, scored_pools, step_bytes
from glm53_mono.geometry import Geometry
from glm53_mono.weights.bf16 import described
from glm53_mono.weights.model import StepWeights
from tests.kernels import rig

LAYERS, EXPERTS = 5, 8
"""Three dense KDA layers, a sparse DSA layer, a sparse KDA layer."""

SPARSE = 2
FP32 = ("weights_proj.weight", "index_kpool_compress_ape", "_fn", "conv1d.weight", "k_norm.weight", "k_norm.bias")
"""bf16 tensors of the checkpoint that SGLang holds as fp32."""

CONFIG = model_config(LAYERS, EXPERTS, "small", mtp=False)
GEOMETRY = checkpoint_geometry(CONFIG)
FULL = checkpoint_geometry(model_config(45, 32, mtp=False))


@pytest.fixture(scope="module", params=[False, True], ids=["shared apart", "shared fused"])
def weights(request: pytest.FixtureRequest) -> StepWeights:
    fused = request.param
    model = rig.random_model(LAYERS, seed=1, experts=EXPERTS, fused=fused)
    return described(model.weights)


def of_checkpoint(*, experts: bool) -> int:
    """Bytes of the checkpoint's layers and last norm as SGLang holds them: the routed experts, or all the rest."""
    chosen = [
        spec
        for spec in tensor_table(CONFIG)
        if "embed_tokens" not in spec.name and "lm_head" not in spec.name and (".experts." in spec.name) == experts
    ]
    return sum(prod(spec.shape) * 4 if spec.name.endswith(FP32) else spec.bytes for spec in chosen)


def test_all_experts_are_the_whole_checkpoint(weights: StepWeights) -> None:
    found = step_bytes(GEOMETRY, weights, [7], [EXPERTS] * SPARSE)
    assert found.weights == of_checkpoint(experts=False)
    assert found.experts == of_checkpoint(experts=True)


def test_experts_count_by_layer(weights: StepWeights) -> None:
    one = of_checkpoint(experts=True) // EXPERTS // SPARSE
    assert step_bytes(GEOMETRY, weights, [7] * 3, [2, 5]).experts == 7 * one
    assert step_bytes(GEOMETRY, weights, [7], [0, 0]).experts == 0
    with pytest.raises(ValueError, match="1 counts of experts for 2 layers"):
        step_bytes(GEOMETRY, weights, [7], [2])


def test_a_weight_left_out_is_noticed(weights: StepWeights) -> None:
    """The comparison with the checkpoint can fail."""
    without = replace(weights, layers=(replace(weights.layers[0], attention=weights.layers[3].attention),
                                       *weights.layers[1:]))  # fmt: skip
    assert step_bytes(GEOMETRY, without, [7], [EXPERTS] * SPARSE).weights != of_checkpoint(experts=False)


def test_weights_count_once_and_caches_by_request(weights: StepWeights) -> None:
    one, three = (step_bytes(GEOMETRY, weights, [40] * rows, [2, 2]) for rows in (1, 3))
    assert (three.weights, three.experts) == (one.weights, one.experts)
    for name in ("embedding", "latents", "state"):
        assert getattr(three, name) == 3 * getattr(one, name) > 0
    assert one.embedding == 2 * GEOMETRY.hidden


def test_a_verify_step_reads_a_state_once_and_writes_it_for_every_token(weights: StepWeights) -> None:
    """Two requests of four rows: two states read, eight written, eight embeddings, and the last rows' latents."""
    decode, verify = (step_bytes(GEOMETRY, weights, [40, 90], [2, 2], tokens) for tokens in (1, 4))
    assert (verify.weights, verify.experts) == (decode.weights, decode.experts)
    assert verify.embedding == 4 * decode.embedding
    assert verify.state * 4 == decode.state * 10
    longer = step_bytes(GEOMETRY, weights, [43, 93], [2, 2])
    assert verify.latents == longer.latents > decode.latents
    assert verify.index_keys == longer.index_keys


@pytest.mark.parametrize(("first", "scored"), [(2048, 0), (2049, 513)])
def test_the_last_row_of_a_request_says_what_is_scored(weights: StepWeights, first: int, scored: int) -> None:
    """Its fourth row is the first to see 2,052 tokens, and so to select."""
    found = step_bytes(FULL, weights, [first], [1] * SPARSE, 4)
    assert found.index_keys == 11 * scored * 132
    assert step_bytes(FULL, weights, [first], [1] * SPARSE).index_keys == 0


@pytest.mark.parametrize(
    ("length", "attended", "scored"),
    [(1, 1, 0), (3, 3, 0), (4, 4, 0), (1024, 1024, 0), (2051, 2051, 0), (2052, 2048, 513), (8193, 2049, 2048)],
)
def test_attention_reads_what_it_selects(length: int, attended: int, scored: int) -> None:
    """`index_topk` 2,048 tokens in pools of 4: 512 of them, and the up to 3 tokens of the unfinished pool."""
    assert (attended_tokens(FULL, length), scored_pools(FULL, length)) == (attended, scored)


def test_caches_at_the_real_sizes(weights: StepWeights) -> None:
    """34 KDA layers of 64 heads of 128 x 128 fp32 and 3 x 24,576 bf16; 11 DSA layers of 512 bf16 and 132 bytes."""
    found = cache_bytes(FULL, weights, [1024, 8192])
    assert found.state == 34 * 2 * 2 * (64 * 128 * 128 * 4 + 3 * 24_576 * 2)
    assert found.latents == 11 * (1024 + 2048) * 512 * 2
    assert found.index_keys == 11 * 2048 * 132


def test_state_read_but_not_written_is_noticed(weights: StepWeights, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = cache_bytes(FULL, weights, [1024]).state
    monkeypatch.setattr(module, "STATE_ITEM", 2)
    assert cache_bytes(FULL, weights, [1024]).state < whole


def test_the_total_is_the_sum() -> None:
    assert StepBytes(1, 10, 100, 1_000, 10_000, 100_000).total == 111_111


def cache_bytes(geometry: Geometry, weights: StepWeights, lengths: list[int]) -> StepBytes:
    """The bytes of a step whose weights are the small model's: only those of the caches mean something."""
    return step_bytes(geometry, weights, lengths, [1] * SPARSE)
