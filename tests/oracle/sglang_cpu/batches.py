"""Requests with their rows, mamba slots and pages, and the batches of SGLang's scheduler that they make."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from glm53_mono.reference.state import StepInputs

from .context import PAGE_TOKENS


@dataclass
class Request:
    """One request's places in the pools and the tokens it has committed."""

    row: int
    """Row of `req_to_token` and of the indexer's rings; 0 is the padding row."""
    slot: int
    """Slot of the convolution windows and recurrent states; 0 is the padding slot."""
    pages: tuple[int, ...]
    """KV pages in the order of the request's tokens; 0 is the padding page."""
    tokens: list[int] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Committed tokens: those whose keys and states the caches hold."""
        return len(self.tokens)

    def cache_slot(self, position: int) -> int:
        """The KV slot of the token at `position`."""
        return self.pages[position // PAGE_TOKENS] * PAGE_TOKENS + position % PAGE_TOKENS


@dataclass(frozen=True)
class Batch:
    """The tokens of one forward, request after request; `lengths` are committed tokens before it."""

    mode: str
    """`extend`, `decode` or `verify`."""
    requests: tuple[Request, ...]
    input_ids: tuple[tuple[int, ...], ...]
    lengths: tuple[int, ...]

    @classmethod
    def of(cls, mode: str, requests: Sequence[Request], input_ids: Sequence[Sequence[int]]) -> Batch:
        """A batch at the requests' present lengths.

        Raises:
            ValueError: token counts that the mode does not allow, or a request without room in its pages.
        """
        counts = {len(ids) for ids in input_ids}
        if len(requests) != len(input_ids) or 0 in counts:
            raise ValueError(
                f"{len(requests)} requests got {[len(ids) for ids in input_ids]} tokens; each needs at least one"
            )
        if mode == "decode" and counts != {1} or mode == "verify" and len(counts) != 1:
            raise ValueError(f"a {mode} step cannot hold {sorted(counts)} tokens a request")
        for request, ids in zip(requests, input_ids, strict=True):
            if request.length + len(ids) > len(request.pages) * PAGE_TOKENS:
                raise ValueError(
                    f"request row {request.row}: {request.length + len(ids)} tokens do not fit pages {request.pages}"
                )
        return cls(mode, tuple(requests), tuple(map(tuple, input_ids)), tuple(request.length for request in requests))

    @property
    def tokens_per_request(self) -> int:
        """Tokens of every request; an extend batch may be ragged and has no such number."""
        (count,) = {len(ids) for ids in self.input_ids}
        return count

    @property
    def flat_ids(self) -> torch.Tensor:
        """Input token ids, request-major, int64 [rows]."""
        return torch.tensor([token for ids in self.input_ids for token in ids], dtype=torch.int64)

    @property
    def positions(self) -> torch.Tensor:
        """Position of every row in its request, int64 [rows]."""
        return torch.tensor([length + i for length, ids in self._spans() for i in range(len(ids))], dtype=torch.int64)

    @property
    def out_cache_loc(self) -> torch.Tensor:
        """KV slot that every row writes, int64 [rows]."""
        slots = [
            request.cache_slot(length + i)
            for request, (length, ids) in zip(self.requests, self._spans(), strict=True)
            for i in range(len(ids))
        ]
        return torch.tensor(slots, dtype=torch.int64)

    @property
    def seq_lens(self) -> torch.Tensor:
        """SGLang's `seq_lens`, int64 [requests]: a verify batch leaves out its draft tokens, the others count all."""
        counted = [length if self.mode == "verify" else length + len(ids) for length, ids in self._spans()]
        return torch.tensor(counted, dtype=torch.int64)

    @property
    def rows(self) -> torch.Tensor:
        """Request rows, int64 [requests]."""
        return torch.tensor([request.row for request in self.requests], dtype=torch.int64)

    @property
    def slots(self) -> torch.Tensor:
        """Mamba slots, int64 [requests]."""
        return torch.tensor([request.slot for request in self.requests], dtype=torch.int64)

    def step_inputs(self, req_to_token: torch.Tensor) -> StepInputs:
        """The same decode or verify step as our reference reads it.

        Args:
            req_to_token: SGLang's table after `enter_tables`, int32 [request rows, longest context].
        """
        return StepInputs(
            mode="target_verify" if self.mode == "verify" else self.mode,
            tokens_per_request=self.tokens_per_request,
            input_ids=self.flat_ids,
            positions=self.positions,
            seq_lens=self.seq_lens,
            req_pool_indices=self.rows,
            out_cache_loc=self.out_cache_loc,
            mamba_slots=self.slots.to(torch.int32),
            verify_rows=torch.arange(len(self.requests), dtype=torch.int32),
            req_to_token=req_to_token,
        )

    def _spans(self) -> list[tuple[int, tuple[int, ...]]]:
        return list(zip(self.lengths, self.input_ids, strict=True))


def enter_tables(runner: Any, batch: Batch) -> None:
    """Enter the batch's mamba slots and KV slots in SGLang's request tables, as its scheduler does."""
    pool = runner.req_to_token_pool
    for request, length, ids in zip(batch.requests, batch.lengths, batch.input_ids, strict=True):
        pool.req_index_to_mamba_index_mapping[request.row] = request.slot
        total = length + len(ids)
        slots = torch.tensor([request.cache_slot(position) for position in range(total)], dtype=pool.req_to_token.dtype)
        pool.req_to_token[request.row, :total] = slots


def forward_batch(runner: Any, batch: Batch) -> Any:
    """SGLang's `ForwardBatch`, bound to the runner's KV plan; in verify mode its drafts are one chain."""
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode

    modes = {"extend": ForwardMode.EXTEND, "decode": ForwardMode.DECODE, "verify": ForwardMode.TARGET_VERIFY}
    seq_lens = batch.seq_lens
    forward = ForwardBatch(
        forward_mode=modes[batch.mode],
        batch_size=len(batch.requests),
        input_ids=batch.flat_ids,
        req_pool_indices=batch.rows,
        seq_lens=seq_lens,
        seq_lens_cpu=seq_lens.clone(),
        seq_lens_sum=int(seq_lens.sum()),
        out_cache_loc=batch.out_cache_loc,
        positions=batch.positions,
    )
    runner.kv_index_translator.bind_own_plan(forward)
    forward.capture_hidden_mode = CaptureHiddenMode.FULL if batch.mode == "verify" else CaptureHiddenMode.NULL
    if batch.mode == "extend":
        counts = torch.tensor([len(ids) for ids in batch.input_ids], dtype=torch.int32)
        forward.extend_prefix_lens = torch.tensor(batch.lengths, dtype=torch.int32)
        forward.extend_prefix_lens_cpu = list(batch.lengths)
        forward.extend_seq_lens = counts
        forward.extend_seq_lens_cpu = counts.tolist()
        forward.extend_start_loc = torch.cumsum(counts, 0).to(torch.int32) - counts
        forward.extend_num_tokens = int(counts.sum())
    if batch.mode == "verify":
        forward.spec_info = _chain_of_drafts(forward, batch.tokens_per_request)
    return forward


def _chain_of_drafts(forward: Any, draft_tokens: int) -> Any:
    from sglang.srt.speculative.eagle_info import EagleVerifyInput

    requests = forward.batch_size
    return EagleVerifyInput(
        draft_token=forward.input_ids,
        custom_mask=None,
        positions=forward.positions,
        retrieve_index=torch.arange(draft_tokens).repeat(requests, 1),
        retrieve_next_token=torch.full((requests, draft_tokens), -1),
        retrieve_next_sibling=torch.full((requests, draft_tokens), -1),
        retrieve_cum_len=torch.arange(requests + 1, dtype=torch.int32) * draft_tokens,
        spec_steps=draft_tokens - 1,
        topk=1,
        draft_token_num=draft_tokens,
        capture_hidden_mode=forward.capture_hidden_mode,
        seq_lens_sum=forward.seq_lens_sum,
        seq_lens_cpu=forward.seq_lens_cpu,
    )
