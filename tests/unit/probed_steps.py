"""Steps as SGLang hands them over, made up small, for the probes: right ones, to be spoilt."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import torch

from glm53_mono.checkpoint.config import checkpoint_geometry, model_config
from glm53_mono.observers import ObservedStep
from glm53_mono.program.pools import Pools
from glm53_mono.upstream.step import Backends, StepBindings

GEOMETRY = checkpoint_geometry(model_config(9, 8, "small", mtp=False))
PAGE, POOL = GEOMETRY.page_tokens, GEOMETRY.pool
ROWS, SLOTS, PAGES, COLUMNS = 6, 8, 14, 1024
"""Request rows, state slots, KV pages and the longest context."""

OWN_PAGES = ((2, 7), (5,), (1, 3, 8, 4))
LENGTHS = (PAGE + 3, 63, 3 * PAGE + 1)
"""Pages and committed tokens of the requests: behind a page's end, within a page, and far beyond one."""

PADDED = 1
"""Requests that only fill up the graph, behind the others."""


@dataclass
class Made:
    """A step and the tensors behind it."""

    step: ObservedStep
    hidden: torch.Tensor


def made(mode: str, seed: int) -> Made:
    """A step of `OWN_PAGES` and a padded request, 1 token each in decode and 4 in target_verify."""
    draw = torch.Generator().manual_seed(seed)
    tokens = 1 if mode == "decode" else 4
    count = len(OWN_PAGES) + PADDED
    table = torch.zeros(ROWS, COLUMNS, dtype=torch.int32)
    request_rows, state_slots = [4, 2, 5, 0], [6, 3, 2, -1]
    positions, locations = [], []
    for row, pages, length in zip(request_rows, OWN_PAGES, LENGTHS, strict=False):
        for place, page in enumerate(pages):
            table[row, place * PAGE : (place + 1) * PAGE] = torch.arange(page * PAGE, (page + 1) * PAGE)
        positions += range(length, length + tokens)
        locations += table[row, length : length + tokens].tolist()
    own = 1 if mode == "decode" else 0
    starts = torch.tensor([*LENGTHS, 0])
    pools = (starts[:, None] + torch.arange(1, tokens + 1)) // POOL
    plan = SimpleNamespace(
        write_start=starts.int(), pool_seqlens_per_q=None if mode == "decode" else pools.flatten().int()
    )
    inputs = StepBindings(
        mode=mode,
        requests=count,
        tokens_per_request=tokens,
        input_ids=torch.zeros(count * tokens, dtype=torch.int64),
        positions=torch.tensor(positions + [0] * tokens),
        request_rows=torch.tensor(request_rows),
        seq_lens=torch.tensor([length + own for length in LENGTHS] + [1]),
        out_cache_loc=torch.tensor(locations + [0] * tokens),
        req_to_token=table,
        state_slots=torch.tensor(state_slots, dtype=torch.int32),
        track_slots=torch.tensor([7, 1, 4, -1]) if mode == "decode" else None,
        track_mask=torch.tensor([True, False, True, False]) if mode == "decode" else None,
        scratch_rows=None if mode == "decode" else torch.arange(ROWS, dtype=torch.int32),
    )
    backends = Backends(None, SimpleNamespace(forward_metadata=SimpleNamespace(kpool_write_plan=plan)), None, None)
    hidden = torch.randn(inputs.rows, GEOMETRY.hidden, generator=draw).bfloat16()
    return Made(ObservedStep(inputs, _pools(mode, tokens, draw), backends, None), hidden)


def _pools(mode: str, tokens: int, draw: torch.Generator) -> Pools:
    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw)

    kda, dsa = len(GEOMETRY.kda_layers), len(GEOMETRY.dsa_layers)
    state = (GEOMETRY.kda_heads, GEOMETRY.kda_head_dim, GEOMETRY.kda_head_dim)
    ring = POOL if mode == "decode" else POOL + tokens
    index = torch.zeros(PAGES, GEOMETRY.index_page_bytes, dtype=torch.uint8)
    index.view(torch.float32)[:, GEOMETRY.page_pools * GEOMETRY.index_head_dim // 4 :] = 0.5
    verify = mode != "decode"
    return Pools(
        conv=[normal(SLOTS, GEOMETRY.conv_history, GEOMETRY.conv_channels).bfloat16() for _ in range(kda)],
        state=[normal(SLOTS, *state) for _ in range(kda)],
        conv_scratch=[normal(ROWS, tokens, 1, 1).bfloat16() for _ in range(kda)] if verify else None,
        state_scratch=[normal(ROWS, tokens, *state) for _ in range(kda)] if verify else None,
        latent=[normal(PAGES * PAGE, GEOMETRY.latent).bfloat16() for _ in range(dsa)],
        index=[index.clone() for _ in range(dsa)],
        ring_key=[normal(ROWS, ring, GEOMETRY.index_head_dim).bfloat16() for _ in range(dsa)],
        ring_gate=[normal(ROWS, ring, GEOMETRY.index_head_dim).bfloat16() for _ in range(dsa)],
    )
