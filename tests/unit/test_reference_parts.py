"""The reference on ugly inputs: ties, empty and full contexts, borders, padding, zeros, a million tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from glm53_mono.checkpoint.config import checkpoint_geometry, model_config
from glm53_mono.geometry import Geometry
from glm53_mono.reference import dense, indexer, kda, mhc, mla, moe, norm, numerics
from glm53_mono.reference.state import Caches
from glm53_mono.reference.step import LayerTrace, commit, step
from glm53_mono.weights.model import ModelWeights
from tests.unit.reference_serving import Server, tiny_model

FULL = checkpoint_geometry(model_config())


@pytest.fixture(scope="module")
def model(pytestconfig: pytest.Config) -> tuple[ModelWeights, Geometry]:
    torch.set_num_threads(1)
    return tiny_model(pytestconfig.option.seed)


def random_bf16(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def test_ties_of_the_router_go_to_the_lower_expert() -> None:
    logits = torch.zeros(2, 288)
    logits[1, [200, 7, 31]] = 1.0
    ids, weights = moe.route(logits, torch.zeros(288), 8)
    assert ids.tolist() == [list(range(8)), [7, 31, 200, 0, 1, 2, 3, 4]]
    torch.testing.assert_close(weights.sum(-1), torch.ones(2))


def test_the_bias_chooses_and_does_not_weigh() -> None:
    bias = torch.zeros(288)
    bias[100] = 5.0
    ids, weights = moe.route(torch.zeros(1, 288), bias, 8)
    assert ids[0, 0] == 100
    torch.testing.assert_close(weights, torch.full((1, 8), 1 / 8))


def test_ties_of_pools_go_to_the_lower_pool() -> None:
    scores = torch.zeros(600)
    scores[599] = 1.0
    assert indexer.best_pools(scores, 600, 512).tolist() == [*range(511), 599]
    assert indexer.best_pools(scores, 599, 512).tolist() == list(range(512))


@pytest.mark.parametrize(
    ("length", "tokens"), [(1, [0]), (3, [0, 1, 2]), (4, [0, 1, 2, 3]), (5, [0, 1, 2, 3, 4]), (0, [])]
)
def test_short_contexts_are_attended_whole(length: int, tokens: list[int]) -> None:
    pools = indexer.best_pools(torch.empty(0), length // FULL.pool, FULL.selected_pools)
    assert indexer.selected_tokens(pools, length, FULL).tolist() == tokens


def test_selection_begins_at_2052_tokens() -> None:
    """2,051 tokens are 512 pools and a full tail: all of them. One more makes 513 pools, of which one is left out."""
    scores = -torch.arange(513.0)
    whole = indexer.selected_tokens(indexer.best_pools(scores, 512, FULL.selected_pools), 2051, FULL)
    chosen = indexer.selected_tokens(indexer.best_pools(scores, 513, FULL.selected_pools), 2052, FULL)
    assert whole.tolist() == list(range(2051)) and len(whole) == FULL.selection_width
    assert chosen.tolist() == list(range(2048)), "the worst pool is left out, be it the newest one"


def test_rows_on_both_sides_of_the_selection_in_one_step(seed: int) -> None:
    """A verify step whose drafts stand at 2,050 to 2,053 tokens, at the published selection width."""
    weights, geometry = tiny_model(seed, layers=1, kda_layers=())
    geometry = replace(geometry, index_topk=2048)
    committed, drafts = 2049, 4
    server = Server.open(geometry, requests=1, pages_each=9, draft_tokens=drafts, seed=seed)
    request = server.requests[0]
    request.committed = committed
    _fill(server.caches, seed)
    inputs = server.inputs("target_verify", [(request, [1, 2, 3, 4])])
    trace: list[LayerTrace] = []
    step(inputs, weights, server.caches, geometry, trace)
    attention = trace[0].attention
    assert isinstance(attention, mla.Attention)
    assert (attention.selection >= 0).sum(1).tolist() == [2050, 2051, 2048, 2049]
    rows = attention.selection[:2]
    assert all(rows[i, : 2050 + i].tolist() == list(range(2050 + i)) for i in range(2))
    assert attention.selection[3, 2048] == 2052, "the tail of the longest row is its own token"


def _fill(caches: Caches, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in caches.tensors():
        if tensor.dtype == torch.uint8:
            tensor.copy_(torch.randint(0, 0x70, tensor.shape, generator=generator))
        elif not name.startswith("intermediate"):
            tensor.copy_(torch.randn(tensor.shape, generator=generator))


def test_padding_writes_no_cache_and_reads_none(model: tuple[ModelWeights, Geometry], seed: int) -> None:
    """Beside padded requests, and on caches of NaN but for its own state, a request computes what it does alone."""
    weights, geometry = model
    for mode, tokens in (("decode", [7]), ("target_verify", [7, 8, 9])):
        servers = [Server.open(geometry, requests=2, pages_each=1, draft_tokens=3, seed=seed) for _ in range(2)]
        for server in servers:
            server.caches.poison()
            server.caches.conv[:, server.requests[0].slot] = 0
            server.caches.temporal[:, server.requests[0].slot] = 0
        alone, crowded = servers
        stale = [10**6, -3, 5][: len(tokens)]
        expected = step(alone.inputs(mode, [(alone.requests[0], tokens)]), weights, alone.caches, geometry)
        batch = [(None, stale), (crowded.requests[0], tokens), (None, stale)]
        inputs = replace(crowded.inputs(mode, batch), verify_rows=torch.tensor([1, 0, 2], dtype=torch.int32))
        hidden = step(inputs, weights, crowded.caches, geometry)
        assert torch.equal(hidden[len(tokens) : 2 * len(tokens)], expected)
        assert not hidden.isnan().any(), "padded rows are finite"
        for (name, found), (_, plain) in zip(crowded.caches.tensors(), alone.caches.tensors(), strict=True):
            assert torch.equal(_bits(found), _bits(plain)), f"{mode}: {name}"


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def test_verify_changes_no_committed_state(model: tuple[ModelWeights, Geometry], seed: int) -> None:
    weights, geometry = model
    server = Server.open(geometry, requests=1, pages_each=1, draft_tokens=3, seed=seed)
    _fill(server.caches, seed)
    before = server.caches.clone()
    inputs = server.inputs("target_verify", [(server.requests[0], [1, 2, 3])])
    step(inputs, weights, server.caches, geometry)
    assert torch.equal(server.caches.conv, before.conv)
    assert torch.equal(server.caches.temporal, before.temporal)
    assert not torch.equal(server.caches.intermediate_ssm, before.intermediate_ssm)


def test_a_batch_of_eight_equals_eight_rows_alone(model: tuple[ModelWeights, Geometry], seed: int) -> None:
    weights, geometry = model
    batched, single = (Server.open(geometry, requests=8, pages_each=1, draft_tokens=0, seed=seed) for _ in range(2))
    for round_ in range(3):
        tokens = [(17 * round_ + 5 * i) % geometry.vocab for i in range(8)]
        pairs = list(zip(batched.requests, tokens, strict=True))
        together = step(batched.inputs("decode", [(r, [t]) for r, t in pairs]), weights, batched.caches, geometry)
        for i, request in enumerate(single.requests):
            alone = step(single.inputs("decode", [(request, [tokens[i]])]), weights, single.caches, geometry)
            assert torch.equal(together[i : i + 1], alone)
            request.committed += 1
            batched.requests[i].committed += 1


def test_more_drafts_than_the_caches_hold_are_refused(model: tuple[ModelWeights, Geometry], seed: int) -> None:
    weights, geometry = model
    server = Server.open(geometry, requests=1, pages_each=1, draft_tokens=2, seed=seed)
    with pytest.raises(ValueError, match="a verify step of 3 tokens a request, on caches for 2"):
        step(server.inputs("target_verify", [(server.requests[0], [1, 2, 3])]), weights, server.caches, geometry)


def test_a_decode_step_has_nothing_to_commit(model: tuple[ModelWeights, Geometry], seed: int) -> None:
    _, geometry = model
    server = Server.open(geometry, requests=1, pages_each=1, draft_tokens=2, seed=seed)
    with pytest.raises(ValueError, match="a decode step has nothing to commit"):
        commit(server.caches, server.inputs("decode", [(server.requests[0], [1])]), torch.tensor([0]))


def test_zeros_stay_finite() -> None:
    nothing = torch.zeros(2, 128).bfloat16()
    assert not norm.rms_norm(nothing, torch.ones(128).bfloat16(), 1e-5).any()
    values, scales = numerics.quantise_fp8(nothing)
    assert not values.float().any() and (scales > 0).all()
    assert not kda.l2_normalise(nothing.float(), 1e-6).any()
    keys, _ = indexer.pool_key(
        nothing[:, None].expand(2, 4, 128), nothing[:, None].expand(2, 4, 128), torch.zeros(4, 128)
    )
    assert not keys.float().any()


def test_a_row_without_tokens_attends_to_nothing(seed: int) -> None:
    cache = torch.full((4, 1, 512), float("nan")).bfloat16()
    out = mla.sparse_attention(random_bf16(seed, 1, 2, 512), cache, torch.full((1, 3), -1), 0.0625)
    assert torch.equal(out, torch.zeros(1, 2, 512).bfloat16())


def test_swiglu_at_the_clamp() -> None:
    gate = torch.tensor([10.0, 10.0625, 1e30, -1e30, -10.0625]).bfloat16()
    up = torch.tensor([10.0625, -10.0625, 1e30, 1e30, 1.0]).bfloat16()
    top = 10 / (1 + torch.exp(torch.tensor(-10.0)))
    low = torch.tensor(-10.0625).bfloat16().float()
    expected = torch.stack([top * 10, -top * 10, top * 10, torch.tensor(0.0), low / (1 + torch.exp(-low))])
    found = dense.clamped_swiglu(torch.cat((gate, up))[None], 10.0)[0]
    assert torch.equal(found + 0.0, expected.bfloat16())


def test_fp8_scales_at_powers_of_two() -> None:
    """448 * 2^k needs the scale 2^k, the next bf16 value above it twice that."""
    exact = torch.tensor([[448.0], [450.0], [224.0], [3.5]]).bfloat16()
    _, scales = numerics.quantise_fp8(exact)
    assert scales.tolist() == [1.0, 2.0, 0.5, 2.0**-7]


def test_hadamard_is_orthonormal(seed: int) -> None:
    """It is its own inverse up to two bf16 roundings, and turns a unit vector into equal entries."""
    x = random_bf16(seed, 3, 128)
    assert (numerics.hadamard(numerics.hadamard(x)).float() - x.float()).abs().max() < 0.05
    unit = torch.zeros(128).bfloat16()
    unit[0] = 1
    assert torch.equal(numerics.hadamard(unit), torch.full((128,), 128**-0.5).bfloat16())


def test_matmul_does_not_depend_on_the_rows_beside(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(shape, generator=generator) for shape in ((8, 1000), (1000, 64)))
    whole = numerics.matmul(a, b)
    assert all(torch.equal(numerics.matmul(a[i : i + 1], b), whole[i : i + 1]) for i in range(8))


def test_gates_are_doubly_stochastic(seed: int) -> None:
    logits = torch.randn(5, 4, 4, generator=torch.Generator().manual_seed(seed))
    comb = mhc.sinkhorn(logits, 20, 1e-6)
    torch.testing.assert_close(comb.sum(-2), torch.ones(5, 4), rtol=0, atol=1e-5)
    torch.testing.assert_close(comb.sum(-1), torch.ones(5, 4), rtol=0, atol=1e-2)


def test_a_million_tokens_are_scored(seed: int) -> None:
    """262,144 pools, the model's longest context: the planted ones are found, at both ends too."""
    pools = 2**20 // FULL.pool
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randint(0, 0x30, (pools, 128), generator=generator, dtype=torch.uint8).view(torch.float8_e4m3fn)
    query = torch.ones(1, 2, 128).to(torch.float8_e4m3fn)
    planted = torch.tensor([0, 65_535, 65_536, pools - 1])
    scales = torch.full((pools,), 2.0**-8)
    scales[planted] = 8.0
    scores = indexer.score(query, torch.ones(1, 2), keys, scales)
    assert indexer.best_pools(scores[0], pools, 4).tolist() == planted.tolist()
    tail = indexer.selected_tokens(planted, 2**20 + 3, FULL)[-3:]
    assert tail.tolist() == [2**20, 2**20 + 1, 2**20 + 2]
