"""Two, four and eight ranks in the interpreter: as right as one rank, the same bits on all, whoever runs ahead."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton.language as tl

from glm53_mono.fault_watch import HostRecord, Watch
from glm53_mono.geometry import MAX_ROWS
from glm53_mono.kernels import embed, monokernel, peers, reduce
from glm53_mono.kernels.peers import LINE_BYTES
from glm53_mono.kernels.record import Kind, Word, device
from glm53_mono.program.reduce import ADDS_PARTIALS, LEAVES_PARTIALS
from glm53_mono.program.tiling import TILINGS
from glm53_mono.reference.state import Caches, StepInputs
from glm53_mono.weights.formats import Formats
from glm53_mono.weights.published import FP8_CHECKPOINT, QUARK_CHECKPOINT, held_by_aiter
from tests.kernels import rig
from tests.kernels.chains import run_chain
from tests.kernels.compare import bits
from tests.kernels.grid import Accesses, Place, places_of, recorded
from tests.kernels.quantised import TINY_BLOCKS, TINY_TILES, stored_as
from tests.kernels.ranks import Faulted, Ranks, RanksComparison, differing_ranks, lockstep, one_ahead, scale_of
from tests.kernels.rig import EVERY_PHASE, ONE_KDA, ONE_MLA, Model, Pattern, tiny_model
from tests.kernels.shards import join_layers, shard_model
from tests.kernels.test_step import some_step
from tests.sources import wrapped

ONE_PROGRAM = replace(TILINGS["interp"], programs=1, output_columns=256)
"""The fewest operations for tests of what happens between ranks, not between programs."""

STEPS = [
    pytest.param(2, [5, 68], 1, 1, id="TP2, decode, a padded request"),
    pytest.param(4, [66], 3, 0, id="TP4, verify"),
    pytest.param(8, [257], 1, 0, id="TP8, decode"),
]

CHAINS = [
    pytest.param(2, ONE_MLA, 6, [253], id="TP2, MTP5"),
    pytest.param(4, ONE_KDA, 4, [9], id="TP4, MTP3"),
    pytest.param(8, ONE_KDA, 3, [66], id="TP8, MTP2"),
]
"""Ranks, layers, tokens of a request, committed lengths."""


def model_for(ranks: int, pattern: Pattern, seed: int) -> Model:
    return tiny_model(pattern, seed=seed, scale=scale_of(ranks), sinkhorn_iterations=2)


def prepared(ranks: int, pattern: Pattern, seed: int) -> tuple[Ranks, StepInputs]:
    model = model_for(ranks, pattern, seed)
    caches, inputs = some_step(model, [9], seed)
    return Ranks.prepare(model, caches, inputs, ranks, tiling=ONE_PROGRAM), inputs


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "lengths", "tokens", "padded"), STEPS)
def test_ranks_are_within_bounds_and_agree(seed: int, ranks: int, lengths: list[int], tokens: int, padded: int) -> None:
    """Each part against the reference of the whole model; after each phase all ranks hold the same bits."""
    model = model_for(ranks, EVERY_PHASE, seed)
    caches, inputs = some_step(model, lengths, seed, tokens=tokens, padded=padded, verify=tokens > 1)
    comparison = RanksComparison.of_ranks(model, caches, inputs, ranks)
    comparison.whole_step().assert_right()
    phases = comparison.launch.phases
    assert sum(phase.kind in ADDS_PARTIALS for phase in phases) == 1 + 2 * model.geometry.layers


@pytest.mark.slow
@pytest.mark.parametrize(
    ("formats", "aiter"),
    [(FP8_CHECKPOINT, False), (QUARK_CHECKPOINT, True)],
    ids=["FP8 as loaded", "Quark as AITER lays it out"],
)
def test_ranks_of_quantised_weights(seed: int, formats: Formats, aiter: bool) -> None:
    """Each rank has its own blocks and scales; the whole model is what the ranks' weights stand for together."""
    widths = (TINY_TILES if aiter else TINY_BLOCKS).expert_width
    scale = replace(TINY_BLOCKS, expert_width=2 * widths, dense_width=2 * TINY_BLOCKS.dense_width)
    plain = tiny_model(EVERY_PHASE, seed=seed, experts=3, fused=aiter, scale=scale, sinkhorn_iterations=2)
    shares = [shard_model(plain, rank, 2) for rank in range(2)]
    if aiter:
        formats = held_by_aiter(formats, shares[0].geometry, shared_fused=True)
    models = [stored_as(share, formats) for share in shares]
    whole = Model(plain.geometry, replace(plain.weights, layers=join_layers(models)))
    caches, inputs = some_step(whole, [68], seed)
    RanksComparison.of_ranks(whole, caches, inputs, 2, models=models).whole_step().assert_right()


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "pattern", "tokens", "lengths"), CHAINS)
def test_verify_equals_decode(seed: int, ranks: int, pattern: Pattern, tokens: int, lengths: list[int]) -> None:
    model = model_for(ranks, pattern, seed)

    def prepare(model: Model, caches: Caches, inputs: StepInputs, **_rest: Any) -> Ranks:
        return Ranks.prepare(model, caches, inputs, ranks, tiling=ONE_PROGRAM)

    def run(launches: Ranks, _caches: Caches, inputs: StepInputs) -> torch.Tensor:
        hidden = launches.run_step(inputs)
        assert not differing_ranks(launches, hidden)
        return hidden[0]

    assert not run_chain(model, lengths, tokens, 1, seed, prepare=prepare, run=run)


def answers(ranks: Ranks, inputs: StepInputs, order: Any, steps: int = 2) -> list[torch.Tensor]:
    """Hidden states of all ranks and the caches behind some steps on the same caches."""
    before, found = ranks.caches.clone(), []
    for _ in range(steps):
        for (_, now), (_, old) in zip(ranks.caches.tensors(), before.tensors(), strict=True):
            now.copy_(old)
        found += [own.clone() for own in ranks.run_step(inputs, order)]
        found += [tensor.clone() for _, tensor in ranks.caches.tensors()]
    return found


def same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(torch.equal(bits(a), bits(b)) for a, b in zip(found, expected, strict=True))


def test_whoever_runs_ahead_and_however_often(seed: int) -> None:
    """A rank that is late, at every reduce and over launches; the count of reduces goes on from step to step."""
    expected = answers(*prepared(2, ONE_KDA, seed), lockstep)
    half = len(expected) // 2
    assert same(expected[:half], expected[half:])
    for leader in range(2):
        ranks, inputs = prepared(2, ONE_KDA, seed)
        assert same(answers(ranks, inputs, one_ahead(leader)), expected)
        for launch in ranks.launches:
            symmetric = launch.workspace.symmetric
            finished = launch.symmetric[symmetric.finished : symmetric.claim].view(torch.int64)
            assert finished[0] == 2 * sum(phase.kind in ADDS_PARTIALS for phase in launch.phases)


def late_rank(ranks: Ranks, inputs: StepInputs, phase: int) -> Faulted | None:
    """What rank 1 says when rank 0 has not run `phase`, which leaves rows, and rank 1 goes on to the next one."""
    steps, hidden = ranks.steps(inputs), ranks.new_hidden(inputs)
    try:
        for rank, at in lockstep(ranks.launches[0].phases[:phase], 2):
            ranks.run_phase(rank, steps[rank], hidden[rank], at)
        for at in (phase, phase + 1):
            ranks.run_phase(1, steps[1], hidden[1], at)
    except Faulted as fault:
        return fault
    return None


@pytest.mark.parametrize("kind", [Kind.EMBED, Kind.KDA_OUTPUT, Kind.DOWN], ids=lambda kind: kind.name)
def test_a_withheld_flag_is_a_fault_that_names_the_rank(seed: int, kind: Kind) -> None:
    """In the second step, so that the flags of the first one are there."""
    ranks, inputs = prepared(2, ONE_KDA, seed)
    ranks.run_step(inputs)
    phases = ranks.launches[0].phases
    reduces = sum(phase.kind in ADDS_PARTIALS for phase in phases)
    at = next(index for index, phase in enumerate(phases) if phase.kind == kind)
    before = sum(phase.kind in ADDS_PARTIALS for phase in phases[:at])
    faulted = late_rank(ranks, inputs, at)
    assert faulted is not None and faulted.rank == 1
    fault = faulted.fault
    assert (fault.phase, fault.peer) == (at + 1, 0)
    assert (fault.expected, fault.seen) == (reduces + before + 1, reduces + before)
    record = HostRecord(ranks.launches[1].host_record)
    sentence = Watch(record, phases, 1, 20.0, lambda: "", lambda: None).sentence(fault)
    wanted = f"rank 1, program {fault.program} waited 15 s before phase {at + 1} ({phases[at + 1].kind.name} of layer "
    assert wanted in sentence
    assert f"rank 0 has not left its rows of reduce {fault.expected}, the last that it left" in sentence


def strays(seed: int) -> list[str]:
    """What two ranks' programs touch and should not, a branch's end and its reduce taken as one stretch."""
    model = model_for(2, ONE_KDA, seed)
    caches, inputs = some_step(model, [9, 3], seed)
    ranks = Ranks.prepare(model, caches, inputs, 2)
    steps, hidden = ranks.steps(inputs), ranks.new_hidden(inputs)
    layout = ranks.launches[0].workspace.symmetric
    starts = [launch.symmetric.data_ptr() for launch in ranks.launches]
    shares = [
        Place(f"partials of rank {rank}", start + layout.partials, start + layout.size)
        for rank, start in enumerate(starts)
    ]
    private = {region.name for region in ranks.launches[0].workspace.regions if region.private} | {"finished"}
    found, stretch = [], Accesses(shares)
    for at, phase in enumerate(ranks.launches[0].phases):
        for rank, launch in enumerate(ranks.launches):
            start = starts[rank]
            counts = Place("finished", start + layout.finished, start + layout.claim, LINE_BYTES.value)
            with recorded([*places_of(launch, ranks.shards[rank], hidden[rank]), *shares, counts]) as accesses:
                ranks.run_phase(rank, steps[rank], hidden[rank], at)
            found += [f"{phase.kind.name}: {line}" for line in (*accesses.races(), *accesses.trespasses())]
            touched = {name for kind in (accesses.reads, accesses.writes) for name, _ in kind}
            declared = phase.access.reads | phase.access.writes | phase.access.owns | private
            found += [f"{phase.kind.name}: {name}" for name in touched if name.partition(" of")[0] not in declared]
            kept = {name for name in accesses.names(accesses.writes) if name.startswith("partials")}
            if kept != ({shares[rank].name} if phase.kind in LEAVES_PARTIALS else set()):
                found.append(f"{phase.kind.name} of rank {rank} writes {sorted(kept)}")
            # by number, so that a program and its namesake on the other rank are one
            stretch = stretch.and_then(accesses)
        if phase.kind not in LEAVES_PARTIALS:
            found += [f"{phase.kind.name}: {line}" for line in stretch.races() if line.startswith("partials")]
            stretch = Accesses(shares)
    return found


def another_tile(right: Callable[..., Any]) -> Callable[..., Any]:
    """The other program's tile is added up."""
    return lambda record, tile, *rest: right(record, 1 - int(tile), *rest)


def test_ranks_touch_what_is_declared_and_each_program_its_namesakes_alone(seed: int) -> None:
    assert not strays(seed)
    with wrapped([(reduce, "sum_of_ranks", another_tile)]):
        assert any("partials of rank" in line and "wrote what program" in line for line in strays(seed))


Seed = tuple[Any, str, Callable[[Any], Any]]
FLAGS_OF_THE_REDUCE_BEFORE: Seed = (
    peers,
    "poll",
    lambda right: lambda flags, rank, number, G: right(flags, rank, number - 1, G),
)
NO_WAIT: Seed = (monokernel, "wait_for_peers", lambda _right: lambda *_: None)
ONE_HALF: Seed = (peers, "half_of", lambda _right: lambda finished: finished * 0)
COUNT_STANDS: Seed = (reduce, "finish_reduce", lambda _right: lambda *_: None)


@pytest.mark.parametrize("bug", [FLAGS_OF_THE_REDUCE_BEFORE, NO_WAIT, COUNT_STANDS], ids=lambda bug: bug[1])
def test_a_wait_for_less_is_found(seed: int, bug: Seed) -> None:
    ranks, inputs = prepared(2, ONE_KDA, seed)
    at = next(i for i, phase in enumerate(ranks.launches[0].phases) if phase.kind == Kind.DOWN)
    with wrapped([bug]):
        ranks.run_step(inputs)
        assert late_rank(ranks, inputs, at) is None


def test_a_buffer_without_halves_is_found(seed: int) -> None:
    expected = answers(*prepared(2, ONE_KDA, seed), lockstep, steps=1)
    with wrapped([ONE_HALF]):
        assert same(answers(*prepared(2, ONE_KDA, seed), lockstep, steps=1), expected)
        assert not same(answers(*prepared(2, ONE_KDA, seed), one_ahead(1), steps=1), expected)


def test_tokens_counted_from_the_first_of_all_are_found(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank takes the rows of the first one's tokens."""
    model = model_for(2, ONE_KDA, seed)
    caches, inputs = some_step(model, [4, 9], seed)
    inputs = replace(inputs, input_ids=torch.tensor([3, model.geometry.vocab - 2]))
    monkeypatch.setattr(embed, "FIRST_TOKEN", device(Word.LATENT_POOL))
    comparison = RanksComparison.of_ranks(model, caches, inputs, 2)
    comparison.stops_at_failure = True
    assert any(finding.part == "embedding" for finding in comparison.whole_step().failures)


def hard_to_add(ranks: int, hidden: int, seed: int) -> torch.Tensor:
    """Rows whose sums depend on the order of the ranks, bf16 [ranks, 8, hidden].

    The last share takes the first one back; between the two, fp32 has only some bits left for the others.
    """
    rows = torch.randn((ranks, MAX_ROWS, hidden), generator=torch.Generator().manual_seed(seed))
    rows[0] *= 2.0**20
    if ranks > 2:
        rows[-1] = -rows[0]
    return rows.bfloat16()


def reduced(ranks: int, seed: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """What each rank's reduce phase makes of rows that are hard to add, bf16 [rows, hidden], and what is right."""
    model = model_for(ranks, ONE_KDA, seed)
    caches, inputs = some_step(model, [1] * MAX_ROWS, seed)
    own = Ranks.prepare(model, caches, inputs, ranks)
    rows = hard_to_add(ranks, model.geometry.hidden, seed)
    layout = own.launches[0].workspace.symmetric
    for share, launch in zip(rows, own.launches, strict=True):
        launch.symmetric[layout.partials : layout.partials + share.numel() * 2] = share.flatten().view(torch.uint8)
        launch.symmetric[layout.flags : layout.finished].view(torch.int64).fill_(1)
    steps, hidden = own.steps(inputs), own.new_hidden(inputs)
    at = next(i for i, phase in enumerate(own.launches[0].phases) if phase.kind == Kind.REDUCE_EMBEDDING)
    for rank in range(ranks):
        own.run_phase(rank, steps[rank], hidden[rank], at)
    expected = torch.zeros(rows.shape[1:])
    for share in rows:
        expected += share.float()
    return [launch.view("streams")[:, 0].clone() for launch in own.launches], expected.bfloat16()


def own_share_first(right: Callable[..., Any]) -> Callable[..., Any]:
    """Each rank adds its own share before the others', as a ring would."""

    def sum_of_ranks(record: Any, tile: Any, rows: Any, columns: int, W: Any, G: Any) -> Any:
        own = int(tl.load(record + int(Word.RANK)))
        if own == 0:
            return right(record, tile, rows, columns, W, G)
        column = (tile * columns + tl.arange(0, columns))[None, :]
        row = tl.arange(0, MAX_ROWS)[:, None]
        finished = tl.load(peers.finished_reduces(record, W))
        total = tl.zeros([MAX_ROWS, columns], tl.float32)
        table = peers.pointer(record, peers.PEERS, tl.int64)
        for turn in range(G.tp_size):
            share = peers.partial_rows(tl.load(table + (own + turn) % G.tp_size), finished, W, G)
            total += tl.load(share + row * G.hidden + column).to(tl.float32)
        return total

    return sum_of_ranks


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_shares_are_added_in_the_order_of_the_ranks(seed: int, ranks: int) -> None:
    found, expected = reduced(ranks, seed)
    for own in found:
        assert torch.equal(bits(own), bits(expected))


def test_another_order_of_the_ranks_is_found(seed: int) -> None:
    with wrapped([(reduce, "sum_of_ranks", own_share_first)]):
        found, expected = reduced(4, seed)
    assert torch.equal(bits(found[0]), bits(expected))
    assert not any(torch.equal(bits(own), bits(expected)) for own in found[1:])


def test_the_device_knows_the_phases_that_the_program_splits() -> None:
    """One table on the host, one on the device."""
    for kind in Kind:
        assert bool(monokernel.leaves_partials(int(kind))) == (kind in LEAVES_PARTIALS), kind
        assert bool(monokernel.adds_partials(int(kind))) == (kind in ADDS_PARTIALS), kind


def test_one_rank_has_no_reduce(seed: int) -> None:
    model = model_for(2, ONE_KDA, seed)
    launch = rig.prepare_launch(model, *some_step(model, [5], seed))
    assert launch.symmetric is None
    assert not ADDS_PARTIALS & {phase.kind for phase in launch.phases}
