"""A routed step under the check: the launch, the same phases one by one, and SGLang's parts on the same inputs.

For each layer its phases run one at a time and leave what goes into and comes out of each part; then SGLang's modules
of that layer run on the same inputs from the same caches. So each part is held to the bounds of one part, whatever the
layers before it have rounded, and the first comparison that fails names the layer and the part. At last the step runs
as the one launch that the server goes on with, from the caches as they were, and must leave the same bits.

All of it is device work without a wait: it runs eagerly, and a graph captures it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from glm53_mono.check import choices, measure, plan
from glm53_mono.check.comparisons import Comparisons
from glm53_mono.check.regions import (
    Live,
    Places,
    Region,
    Store,
    a_row,
    bytes_a_layer,
    closed_keys,
    layer_regions,
    lengths_of,
    live_of,
    places_of,
    put_back,
)
from glm53_mono.check.settings import Settings
from glm53_mono.geometry import MAX_ROWS
from glm53_mono.kernels.mhc import GROUP
from glm53_mono.kernels.monokernel import StepSizes, StepTensors
from glm53_mono.kernels.record import Kind, Word
from glm53_mono.program.launch import Launch
from glm53_mono.program.pools import Pools
from glm53_mono.upstream.parts import BranchInput, Parts

logger = logging.getLogger(__name__)

POST, COMB = 0, GROUP.value
"""Places of a row's post and comb in the region `coefficients` (kernels/mhc.py: mix_coefficients)."""


@dataclass(frozen=True)
class WholeForward:
    """SGLang's forward of the step in progress.

    Attributes:
        run: runs it from the caches as they are, and returns what it returns.
        logits: [rows, vocab] of what `run` returned.
        logits_of: the same of hidden states [rows, hidden] bf16.
    """

    run: Callable[[], Any]
    logits: Callable[[Any], Tensor]
    logits_of: Callable[[Tensor], Tensor]


class CheckError(ValueError):
    """A launch that cannot be checked; the message says why."""


class Check:
    """Runs checked steps of one launch; takes its memory when it is made.

    Args:
        launch: as built for a model of one rank, its caches not bound yet.
        settings: what the environment asks.

    Raises:
        CheckError: the launch keeps too little of a step.
    """

    def __init__(self, launch: Launch, settings: Settings) -> None:
        geometry, workspace = launch.geometry, launch.workspace
        if workspace.mix_tiles > workspace.programs:
            raise CheckError(
                f"a launch of {workspace.programs} programs keeps the output of as many tiles of a branch, "
                f"of {workspace.mix_tiles}"
            )
        self._launch = launch
        self._settings = settings
        self._verify = launch.variant.verify
        self._device = launch.buffer.device
        self.comparisons = Comparisons(
            plan.comparisons(geometry, launch.formats, verify=self._verify, whole=settings.keeps_sglang),
            settings.every,
            self._device,
        )
        sizes = {layer: bytes_a_layer(geometry, layer, verify=self._verify) for layer in range(geometry.layers)}
        before = sizes if settings.keeps_sglang else {0: max(sizes.values())}
        total = sum(sizes.values()) + sum(before.values()) + max(sizes.values()) + self.comparisons.bytes()
        logger.info(
            "monokernel check: takes %.1f MiB of device memory: %d comparisons a step, every step of %d",
            total / 2**20, len(self.comparisons.comparisons), settings.every,
        )  # fmt: skip
        self._after = Store(sizes, self._device)
        self._before = Store(before, self._device)
        self._now = Store({0: max(sizes.values())}, self._device)
        self._streams = torch.zeros(
            (2, MAX_ROWS, geometry.streams * geometry.hidden), dtype=torch.bfloat16, device=self._device
        )
        longest = workspace.max_pools * geometry.pool + geometry.pool
        self._tables = torch.zeros((2, MAX_ROWS, longest), dtype=torch.int32, device=self._device)
        self._regions: list[list[Region]] = []
        self._layers = _Layers(launch)

    @property
    def settings(self) -> Settings:
        """As asked."""
        return self._settings

    @property
    def verify(self) -> bool:
        """Whether the steps are verify steps."""
        return self._verify

    @property
    def launches_a_step(self) -> int:
        """Launches of the kernel in a checked step: each phase's, then the whole one."""
        return len(self._launch.phases) + 1

    def bind(self, pools: Pools, tokens: int) -> None:
        """Tells where the caches are, before the first step.

        Args:
            tokens: rows of a request.
        """
        geometry = self._launch.geometry
        self._regions = [layer_regions(pools, geometry, i, verify=self._verify) for i in range(geometry.layers)]
        self.comparisons.fit(self._columns(), tokens)

    def run(
        self,
        parts: Parts,
        tensors: StepTensors,
        sizes: StepSizes,
        hidden: Tensor,
        whole: WholeForward | None = None,
    ) -> Any:
        """Runs a step and compares it.

        Args:
            parts: SGLang's, of the step in progress.
            hidden: bf16 [rows, hidden], gets the launch's result.
            whole: SGLang's forward of this step; needed where the server goes on with its results.

        Returns:
            What that forward returned, None without it.
        """
        launch, geometry = self._launch, self._launch.geometry
        # first of all: it is what the step's own metadata was made of
        table = self._table_rows(tensors, sizes, 0)
        step = _Step(self, parts, tensors, sizes)
        self.comparisons.begin()
        launch.poison()
        step.embed()
        for layer in range(geometry.layers):
            step.layer(layer)
        by_phase = torch.empty_like(hidden)
        step.head(by_phase)
        launch.poison()
        if launch.variant.backend == "interp":
            launch.run_by_phase(tensors, sizes, hidden)
        else:
            launch.run(tensors, sizes, hidden)
        for layer in range(geometry.layers):
            step.compare_launch(layer)
        self.comparisons.compare(geometry.layers, plan.LAUNCH, "hidden", hidden, by_phase, step.live.rows)
        theirs = None
        if whole is not None:
            for layer in range(geometry.layers):
                put_back(self._regions[layer], step.places, step.before[layer])
            theirs = whole.run()
            logits = whole.logits_of(hidden), whole.logits(theirs)
            self.comparisons.compare(geometry.layers, plan.FORWARD, "logits", *logits, step.live.rows)
        moved = (table != self._table_rows(tensors, sizes, 1)) & step.known_tokens(table.shape[1])
        self.comparisons.leave_out(moved.any(1), sizes.tokens)
        self.comparisons.end(tensors.request_rows)
        return theirs

    def _table_rows(self, tensors: StepTensors, sizes: StepSizes, copy: int) -> Tensor:
        """Each request's row of SGLang's table as it is now, [requests, tokens] int32.

        With overlapped scheduling the row of a request that has just ended may pass to a new one while its last step
        runs (upstream/step.py). What such a step computes is discarded, so a request whose row has changed is left out.
        """
        requests, table = sizes.rows // sizes.tokens, tensors.req_to_token
        kept = self._tables[copy].flatten()[: requests * table.shape[1]].view(requests, table.shape[1])
        return torch.index_select(table, 0, tensors.request_rows[:requests], out=kept)

    def _columns(self) -> dict[tuple[int, str, str], int]:
        """Values of a row of each comparison."""
        geometry = self._launch.geometry
        widths = {
            "streams": geometry.streams * geometry.hidden,
            "input": geometry.hidden,
            "output": geometry.hidden,
            "hidden": geometry.hidden,
            "post": geometry.streams,
            "comb": geometry.streams**2,
            "logits": geometry.vocab,
            "chosen experts": 1,
            "chosen pools": 1,
            "expert weights": geometry.experts,
        }
        found = {}
        for c in self.comparisons.comparisons:
            if c.value in widths:
                found[c.layer, c.part, c.value] = widths[c.value]
            elif c.value == "index keys" and c.part == plan.ATTENTION:
                found[c.layer, c.part, c.value] = geometry.index_head_dim
            else:
                region = next(r for r in self._regions[c.layer] if r.name == c.value)
                found[c.layer, c.part, c.value] = region.cache[0].numel()
        return found


class _Step:
    """One step in progress."""

    def __init__(self, check: Check, parts: Parts, tensors: StepTensors, sizes: StepSizes) -> None:
        self._check = check
        self._launch = check._launch
        self._geometry = check._launch.geometry
        self._compare = check.comparisons.compare
        self._parts = parts
        self._tensors = tensors
        self._sizes = sizes
        self._rows = sizes.rows
        self._unused = torch.empty((sizes.rows, self._geometry.hidden), dtype=torch.bfloat16, device=check._device)
        self.places: Places = places_of(tensors, sizes, self._geometry)
        self.live: Live = live_of(tensors, sizes, self._geometry, verify=check._verify)
        self.before: list[list[Tensor]] = []
        self._after: list[list[Tensor]] = []
        self._lengths = lengths_of(tensors, sizes, verify=check._verify)

    def known_tokens(self, width: int) -> Tensor:
        """[requests, width] bool, the places of the table that hold a token of the request's last row."""
        last = self._lengths[self._sizes.tokens - 1 :: self._sizes.tokens]
        return torch.arange(width, device=last.device) < last[:, None]

    def embed(self) -> None:
        """The first phase against SGLang's embedding, in all four streams."""
        self._run(self._check._layers.embed)
        ids = torch.where(self.live.rows != 0, self._tensors.input_ids[: self._rows], 0)
        expected = self._parts.embedded(ids).repeat(1, self._geometry.streams)
        self._compare(-1, plan.EMBEDDING, "streams", self._streams(), expected, self.live.rows)

    def head(self, hidden: Tensor) -> None:
        """The last phase against SGLang's final norm."""
        streams = self._streams().clone()
        self._launch.run(self._tensors, self._sizes, hidden, self._check._layers.head, self._check._layers.head + 1)
        expected = self._parts.final(streams)
        self._compare(self._geometry.layers, plan.FINAL, "hidden", hidden, expected, self.live.rows)

    def layer(self, layer: int) -> None:
        """A layer's phases, then SGLang's parts of it from the same caches, which are left as they were."""
        check, regions = self._check, self._check._regions[layer]
        attention, ffn = check._layers.branches[layer]
        kept = check._settings.keeps_sglang
        before = check._before.save(layer if kept else 0, regions, self.places)
        if kept:
            self.before.append(before)
        first, second = check._streams[0, : self._rows], check._streams[1, : self._rows]
        first.copy_(self._streams())
        read = self._read_branch(attention)
        output = self._branch_output()
        second.copy_(self._streams())
        after = check._after.save(layer, regions, self.places)
        self._after.append(after)
        put_back(regions, self.places, before)
        self._compare_input(layer, plan.ATTENTION, read, self._parts.attention_input(layer, first))
        with self._choosing_pools(layer):
            expected = self._parts.attention(layer, read.mixed.clone())
        now = check._now.save(0, regions, self.places)
        put_back(regions, self.places, before)
        self._compare_regions(layer, after, now, before)
        self._compare(layer, plan.ATTENTION, "output", output, expected, self.live.rows)
        updated = self._parts.updated(layer, output, first, read.comb, read.post)
        self._compare(layer, plan.ATTENTION, "streams", second, updated, self.live.rows)

        read = self._read_branch(ffn)
        output = self._branch_output()
        self._compare_input(layer, plan.FFN, read, self._parts.ffn_input(layer, second))
        with self._choosing_experts(layer):
            expected = self._parts.ffn(layer, read.mixed.clone())
        self._compare(layer, plan.FFN, "output", output, expected, self.live.rows)
        updated = self._parts.updated(layer, output, second, read.comb, read.post)
        self._compare(layer, plan.FFN, "streams", self._streams(), updated, self.live.rows)

    def compare_launch(self, layer: int) -> None:
        """What the one launch has left of a layer against what its phases left one by one."""
        regions = self._check._regions[layer]
        now = self._check._now.save(0, regions, self.places)
        for region, found, expected in zip(regions, now, self._after[layer], strict=True):
            self._compare(layer, plan.LAUNCH, region.name, found, expected, self._live_in(region))

    def _live_in(self, region: Region) -> Tensor:
        if region.places == "track":
            return self.live.tracked
        return self.live.rows if region.places in ("cache", "page") else self.live.requests

    def _run(self, phase: int) -> None:
        self._launch.run(self._tensors, self._sizes, self._unused, phase, phase + 1)

    def _streams(self) -> Tensor:
        """[rows, 4 hidden] bf16, as the last phase left them; not a copy."""
        return self._launch.view("streams")[: self._rows].flatten(1)

    def _read_branch(self, phases: range) -> BranchInput:
        """Runs a branch's phases; returns copies of what the first of them, its mix, has read."""
        mixed = None
        for phase in phases:
            self._run(phase)
            if phase == phases.start:
                mixed = self._launch.view("mixed")[: self._rows].clone()
        assert mixed is not None
        coefficients = self._launch.view("coefficients")[: self._rows]
        streams = self._geometry.streams
        return BranchInput(
            mixed=mixed,
            post=coefficients[:, POST : POST + streams].clone(),
            comb=coefficients[:, COMB : COMB + streams**2].clone(),
        )

    def _branch_output(self) -> Tensor:
        """[rows, hidden] bf16: a copy of the output of the branch whose last phase has just run."""
        tiles = self._launch.view("tile")[: self._launch.workspace.mix_tiles, : self._rows]
        return tiles.transpose(0, 1).flatten(1)[:, : self._geometry.hidden].contiguous()

    def _compare_input(self, layer: int, part: str, found: BranchInput, expected: BranchInput) -> None:
        live = self.live.rows
        self._compare(layer, part, "input", found.mixed, expected.mixed, live)
        self._compare(layer, part, "post", found.post, expected.post, live)
        self._compare(layer, part, "comb", found.comb, expected.comb, live)

    def _compare_regions(self, layer: int, found: list[Tensor], now: list[Tensor], before: list[Tensor]) -> None:
        """What the launch's phases wrote of a layer against what SGLang's attention wrote."""
        for i, region in enumerate(self._check._regions[layer]):
            expected = now[i]
            if region.places == "track":
                # behind their originals: a saved state is a copy of the request's own
                expected = found[i - 2]
            elif self._check._verify and region.places == "state":
                expected = before[i]
            if region.name == "index keys":
                tiled = self._launch.variant.index_tiled
                found_keys, expected_keys = (
                    closed_keys(pages, self._lengths, self._geometry, tiled=tiled) for pages in (found[i], expected)
                )
                live = self.live.closing
                self._compare(layer, plan.ATTENTION, region.name, found_keys, expected_keys, live)
            else:
                self._compare(layer, plan.ATTENTION, region.name, found[i], expected, self._live_in(region))

    def _choosing_experts(self, layer: int) -> Any:
        """Compares the experts of a sparse layer when SGLang chooses them."""
        geometry = self._geometry
        if geometry.is_dense(layer):
            return nullcontext()
        experts = geometry.experts
        bias = self._check._layers.biases[layer]

        def choose(weights: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
            own = self._launch.view("expert_weight")[0, : self._rows]
            scores = self._launch.view("router")[:, : self._rows].sum(0).sigmoid() + bias
            choice = choices.compared(
                own != 0, choices.expert_mask(ids, experts), scores, torch.ones_like(scores, dtype=torch.bool)
            )
            live = self.live.rows
            tied = self._ties(layer, plan.FFN, "chosen experts", choice, measure.EXPERT_TIES)
            weights, ids = choices.with_experts(weights, ids, own, geometry.experts_per_token, tied, experts)
            theirs = choices.normalised_weights(weights, ids, experts)
            self._compare(layer, plan.FFN, "expert weights", own, theirs, live)
            return weights, ids

        return self._parts.experts_chosen_by(layer, choose)

    def _choosing_pools(self, layer: int) -> Any:
        """Compares the pools of a sparse attention when SGLang chooses them."""
        geometry, workspace = self._geometry, self._launch.workspace
        if layer not in geometry.dsa_layers:
            return nullcontext()
        table = self._tensors.req_to_token
        pools = min(workspace.max_pools, table.shape[1] // geometry.pool)
        lengths = self._lengths
        request = a_row(self._tensors.request_rows[: self._rows // self._sizes.tokens], self._sizes)
        selects = (lengths // geometry.pool > geometry.selected_pools) & (self.live.rows != 0)

        def choose(tokens: Tensor, are_slots: bool) -> Tensor:
            device = tokens.device
            own = self._launch.view("selected")[: self._rows].long()
            own = torch.where(selects[:, None], own, -1)
            launch = choices.mask_of(own, pools)
            first = torch.arange(pools, device=device) * geometry.pool
            known = selects[:, None] & (torch.arange(pools, device=device) < (lengths // geometry.pool)[:, None])
            names = table[request[:, None], first].long() if are_slots else first.expand(self._rows, -1)
            sglang = choices.contained(names, tokens.long()) & known
            scores = self._launch.view("scores")[: self._rows, :pools]
            choice = choices.compared(launch, sglang, scores, known)
            tied = self._ties(layer, plan.ATTENTION, "chosen pools", choice, measure.POOL_TIES)
            wanted = choices.tokens_of_pools(own, lengths, geometry.pool, tokens.shape[1])
            if are_slots:
                slots = table[request[:, None], wanted.clamp(min=0)].long()
                wanted = torch.where(wanted >= 0, slots, -1)
            return torch.where(tied[:, None], wanted.to(tokens.dtype), tokens)

        return self._parts.tokens_chosen_by(layer, choose)

    def _ties(self, layer: int, part: str, value: str, choice: choices.Choice, kind: int) -> Tensor:
        """Compares how far a choice is from a tie; counts and returns the rows whose near-tie fell the other way."""
        live, comparisons = self.live.rows, self._check.comparisons
        beyond = choice.beyond[:, None]
        self._compare(layer, part, value, beyond, torch.zeros_like(beyond), live)
        tied = choice.apart & (choice.beyond <= comparisons.bound_of(layer, part, value).rel) & (live != 0)
        comparisons.count_ties(kind, tied)
        return tied


class _Layers:
    """Which phases are a branch's, and the biases of the routers."""

    def __init__(self, launch: Launch) -> None:
        phases = launch.phases
        self.embed = 0
        self.head = len(phases) - 1
        starts = [i for i, phase in enumerate(phases) if phase.kind is Kind.MIX] + [self.head]
        branches = [range(first, last) for first, last in pairwise(starts)]
        self.branches = list(zip(branches[::2], branches[1::2], strict=True))
        self.biases: dict[int, Tensor] = {}
        for phase in phases:
            if phase.kind is Kind.EXPERTS:
                bias = phase.words[Word.GATE_BIAS]
                assert isinstance(bias, Tensor)
                self.biases[phase.layer] = bias
