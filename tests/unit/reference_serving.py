"""A toy server around the reference: requests with scattered rows, slots and pages, and the inputs of their steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from glm53_mono.checkpoint.config import Scale, checkpoint_geometry, model_config, order_layers
from glm53_mono.cli.checkpoint import checkpoint_tensors
from glm53_mono.geometry import Geometry
from glm53_mono.reference.state import PADDED_LOCATION, PADDED_SLOT, Caches, Mode, StepInputs
from glm53_mono.reference.weights import from_checkpoint
from glm53_mono.weights.model import ModelWeights

TINY = Scale(
    hidden=128,
    vocab=512,
    heads=1,
    q_rank=32,
    latent=128,
    index_heads=2,
    index_topk=16,
    experts_per_token=2,
    expert_width=32,
    dense_width=64,
)
"""Sizes at which a layer costs a few milliseconds; 4 pools are selected, so contexts beyond 19 tokens choose."""


def tiny_model(seed: int, *, kda_layers: Sequence[int] = (0, 2), layers: int = 3) -> tuple[ModelWeights, Geometry]:
    """A model of `layers` layers, the first one dense, with random weights."""
    config = model_config(layers, 6, TINY, mtp=False)
    order_layers(config, kda_layers, dense_layers=1)
    geometry = checkpoint_geometry(config)
    return from_checkpoint(dict(checkpoint_tensors(config, seed)), geometry), geometry


@dataclass
class Request:
    """One sequence and where the pools keep it."""

    row: int
    slot: int
    pages: list[int]
    committed: int = 0


@dataclass
class Server:
    """Pools for a few requests; two servers of one seed place their requests alike."""

    geometry: Geometry
    draft_tokens: int
    requests: list[Request]
    caches: Caches
    req_to_token: Tensor = field(repr=False)

    @classmethod
    def open(cls, geometry: Geometry, *, requests: int, pages_each: int, draft_tokens: int, seed: int) -> Server:
        """Place requests on random rows, slots and pages; page, slot and row 0 stay for padding."""
        generator = torch.Generator().manual_seed(seed)

        def shuffled(count: int) -> list[int]:
            return (torch.randperm(count, generator=generator) + 1).tolist()

        rows, slots, pages = shuffled(requests + 2), shuffled(requests + 2), shuffled(requests * pages_each)
        placed = [Request(rows[i], slots[i], pages[i * pages_each : (i + 1) * pages_each]) for i in range(requests)]
        req_to_token = torch.zeros(requests + 3, pages_each * geometry.page_tokens, dtype=torch.int32)
        for request in placed:
            starts = torch.tensor(request.pages)[:, None] * geometry.page_tokens
            req_to_token[request.row] = (starts + torch.arange(geometry.page_tokens)).flatten()
        caches = Caches.empty(
            geometry,
            mamba_slots=requests + 2,
            request_rows=requests + 3,
            pages=requests * pages_each + 1,
            draft_tokens=draft_tokens,
            verify_rows=requests + 1,
        )
        return cls(geometry, draft_tokens, placed, caches, req_to_token)

    def inputs(self, mode: Mode, batch: Sequence[tuple[Request | None, Sequence[int]]]) -> StepInputs:
        """The step of a batch of requests and their next tokens; a request of None is padding."""
        tokens = len(batch[0][1])
        ids, positions, locations, lengths, rows, slots = [], [], [], [], [], []
        for request, request_tokens in batch:
            start = request.committed if request else 0
            places = torch.arange(start, start + tokens)
            ids.append(torch.tensor(request_tokens))
            positions.append(places)
            locations.append(
                self.req_to_token[request.row, places].long() if request else torch.full((tokens,), PADDED_LOCATION)
            )
            lengths.append(start + (mode == "decode"))
            rows.append(request.row if request else 0)
            slots.append(request.slot if request else PADDED_SLOT)
        return StepInputs(
            mode=mode,
            tokens_per_request=tokens,
            input_ids=torch.cat(ids),
            positions=torch.cat(positions),
            seq_lens=torch.tensor(lengths),
            req_pool_indices=torch.tensor(rows),
            out_cache_loc=torch.cat(locations),
            mamba_slots=torch.tensor(slots, dtype=torch.int32),
            verify_rows=torch.arange(len(batch), dtype=torch.int32),
            req_to_token=self.req_to_token,
        )

    def committed_state(self, request: Request) -> dict[str, Tensor]:
        """Every cache entry that a later step of the request may read."""
        g, caches, length = self.geometry, self.caches, request.committed
        slots = self.req_to_token[request.row, :length].long()
        state = {"conv": caches.conv[:, request.slot], "temporal": caches.temporal[:, request.slot]}
        pools = torch.arange(length // g.pool)
        pages, entries = torch.tensor(request.pages)[pools // g.page_pools], pools % g.page_pools
        keys = g.page_pools * g.index_head_dim
        for layer in range(len(g.dsa_layers)):
            page_keys = caches.index[layer][:, :keys].unflatten(1, (g.page_pools, -1))
            page_scales = caches.index[layer][:, keys:].unflatten(1, (g.page_pools, -1))
            ring_size = caches.ring_key[layer].shape[1]
            waiting = torch.arange(length // g.pool * g.pool, length) % ring_size
            state |= {
                f"latent.{layer}": caches.latent[layer][slots, 0],
                f"index_key.{layer}": page_keys[pages, entries],
                f"index_scale.{layer}": page_scales[pages, entries],
                f"ring_key.{layer}": caches.ring_key[layer][request.row, waiting],
                f"ring_gate.{layer}": caches.ring_gate[layer][request.row, waiting],
            }
        return state
