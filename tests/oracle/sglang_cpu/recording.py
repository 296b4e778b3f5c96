"""SGLang's steps as records, so that many checks share one slow run of SGLang."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from glm53_mono.cli.parts import StepTrace
from glm53_mono.geometry import Geometry
from glm53_mono.reference.state import Caches

from .batches import Batch, Request, enter_tables
from .forward import SglangModel


@dataclass(frozen=True)
class Record:
    """One forward of SGLang's model, with its commit if it was a verify step."""

    name: str
    batch: Batch
    req_to_token: torch.Tensor
    before: Caches
    trace: StepTrace
    after: Caches
    accepted: tuple[int, ...] | None = None
    """Accepted drafts of each request; None where there is nothing to commit."""
    after_commit: Caches | None = None


@dataclass
class Recorder:
    """Runs steps on SGLang's model and keeps a record of each."""

    model: SglangModel
    records: list[Record]
    generator: torch.Generator
    vocab: int

    def tokens(self, count: int) -> list[int]:
        """So many random token ids."""
        return torch.randint(self.vocab, (count,), generator=self.generator).tolist()

    def extend(self, name: str, requests: Sequence[Request], counts: Sequence[int]) -> None:
        """Prefill so many new random tokens of each request."""
        self._run(name, Batch.of("extend", requests, [self.tokens(count) for count in counts]))

    def decode(self, name: str, requests: Sequence[Request]) -> None:
        """Decode one random token of each request."""
        self._run(name, Batch.of("decode", requests, [self.tokens(1) for _ in requests]))

    def verify(self, name: str, requests: Sequence[Request], draft_tokens: int, accepted: Sequence[int]) -> None:
        """Verify random drafts of each request; commit the first token and so many drafts, as if others were wrong."""
        batch = Batch.of("verify", requests, [self.tokens(draft_tokens) for _ in requests])
        self._run(name, batch, tuple(accepted))

    def _run(self, name: str, batch: Batch, accepted: tuple[int, ...] | None = None) -> None:
        before = self.model.caches.clone()
        trace = self.model.forward(batch)
        after = self.model.caches.clone()
        table = self.model.req_to_token.clone()
        if accepted is None:
            self.records.append(Record(name, batch, table, before, trace, after))
            return
        self.model.commit(batch, accepted)
        self.records.append(Record(name, batch, table, before, trace, after, accepted, self.model.caches.clone()))


def grow_synthetic_context(
    model: SglangModel, request: Request, length: int, geometry: Geometry, generator: torch.Generator
) -> None:
    """Give a request `length` committed tokens whose caches hold random values: a long context without its prefill.

    Written are the recurrent state, the window, the latents of the tokens, the pooled keys of finished pools and the
    ring's entries of the unfinished one; all else of the request's places stays what it was.
    """

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    caches = model.caches
    caches.conv[:, request.slot] = normal(*caches.conv[:, request.slot].shape).bfloat16()
    caches.temporal[:, request.slot] = normal(*caches.temporal[:, request.slot].shape) * 0.3
    slots = torch.tensor([request.cache_slot(position) for position in range(length)])
    pools = torch.arange(length // geometry.pool)
    pages = slots[pools * geometry.pool] // geometry.page_tokens
    entries = pools % geometry.page_pools
    key_bytes = geometry.page_pools * geometry.index_head_dim
    for layer in range(len(geometry.dsa_layers)):
        caches.latent[layer][slots, 0] = normal(length, geometry.latent).bfloat16()
        keys = (normal(len(pools), geometry.index_head_dim) * 100).to(torch.float8_e4m3fn)
        scales = torch.exp2(torch.randint(-9, -4, (len(pools),), generator=generator).float())
        index = caches.index[layer]
        index[:, :key_bytes].view(index.shape[0], geometry.page_pools, -1)[pages, entries] = keys.view(torch.uint8)
        index[:, key_bytes:].view(index.shape[0], geometry.page_pools, -1)[pages, entries] = scales.view(
            torch.uint8
        ).view(-1, 4)
        for ring in (caches.ring_key[layer], caches.ring_gate[layer]):
            for position in range(length // geometry.pool * geometry.pool, length):
                ring[request.row, position % ring.shape[1]] = normal(geometry.index_head_dim).bfloat16()
    request.tokens.extend([0] * length)
    enter_tables(model.runner, Batch("extend", (request,), ((),), (length,)))
