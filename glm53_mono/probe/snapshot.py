"""A step's requests, and the parts of SGLang's table of slots that probes ask about, copied before anything else.

With overlapped scheduling a request that has just ended runs one step more, during which its row of the table may pass
to a new one (`upstream/step.py`). Copied within some tens of microseconds of the step's start, the table is still the
ended request's in all but name: the host writes it only after it has seen that the request ended.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from glm53_mono.observers import ObservedStep

WINDOW = 1024
"""Tokens of a request that one step looks at: 8 MiB of latents at a time for 8 requests."""


@dataclass(frozen=True)
class Requests:
    """A step's requests as probes ask about them; B requests of T tokens.

    Attributes:
        active: [B] bool; the others only fill a graph up, as all of SGLang's runs before the first request do.
        place: [B, 1] int64, 0 to B - 1.
        row: [B, T] int64, 0 to B * T - 1.
        committed: [B] int64, tokens before the step.
        table_rows: [B] int64, rows of `req_to_token`, within it whatever SGLang says.
        state_slots: [B] int64, likewise within the states.
    """

    active: Tensor
    place: Tensor
    row: Tensor
    committed: Tensor
    table_rows: Tensor
    state_slots: Tensor

    @classmethod
    def of(cls, step: ObservedStep) -> Requests:
        """Of a step."""
        inputs, pools = step.inputs, step.pools
        count, tokens = inputs.requests, inputs.tokens_per_request
        longest = inputs.req_to_token.shape[1]
        place = torch.arange(count, device=inputs.seq_lens.device)[:, None]
        own = 1 if inputs.mode == "decode" else 0
        states = pools.state[0].shape[0] if pools.state else 1
        return cls(
            active=inputs.out_cache_loc.view(count, tokens)[:, 0] != 0,
            place=place,
            row=torch.arange(count * tokens, device=place.device).view(count, tokens),
            committed=(inputs.seq_lens - own).clamp(0, longest - 1),
            table_rows=inputs.request_rows.clamp(0, inputs.req_to_token.shape[0] - 1),
            state_slots=inputs.state_slots.long().clamp(0, states - 1),
        )


@dataclass(frozen=True)
class Tables:
    """Slots of B requests of T tokens.

    Attributes:
        page_slots: [B, pages of the longest context] int64, slot of each page's first token.
        own_tokens: [B, T] int64, positions that the step writes.
        own_slots: [B, T] int64, the table's slots there.
        window_tokens: [B, WINDOW] int64, positions in the prefix that this step looks at.
        window_slots: [B, WINDOW] int64, the table's slots there.
        window_seen: [B, WINDOW] bool; the others are there twice, or of requests that are none.
    """

    page_slots: Tensor
    own_tokens: Tensor
    own_slots: Tensor
    window_tokens: Tensor
    window_slots: Tensor
    window_seen: Tensor

    @classmethod
    def of(cls, step: ObservedStep, requests: Requests, number: Tensor, page_tokens: int) -> Tables:
        """Of a step.

        Args:
            number: of the step, [] float64: the window moves on with it, and begins again behind the prefix's end.
            page_tokens: tokens of a page.
        """
        table, rows, committed = step.inputs.req_to_token, requests.table_rows, requests.committed[:, None]
        page_slots = table[:, ::page_tokens].index_select(0, rows).long()
        steps = torch.arange(step.inputs.tokens_per_request, device=table.device)
        own_tokens = (committed + steps).clamp(max=table.shape[1] - 1)
        own_slots = table[rows[:, None], own_tokens].long()
        offsets, known = torch.arange(WINDOW, device=table.device), committed.clamp(min=1)
        window_tokens = ((number * WINDOW).long() % known + offsets) % known
        return cls(
            page_slots=page_slots,
            own_tokens=own_tokens,
            own_slots=own_slots,
            window_tokens=window_tokens,
            window_slots=table[rows[:, None], window_tokens].long(),
            window_seen=requests.active[:, None] & (offsets < committed),
        )
