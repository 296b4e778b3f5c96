"""Probes of what a step reads and writes in the caches: rows that were never written, numbers that are not finite.

A prefix may have hundreds of thousands of tokens, so each step looks at a window of each request's (`snapshot.py`).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from glm53_mono.geometry import MAX_ROWS, Geometry
from glm53_mono.observers import ObservedStep
from glm53_mono.probe.findings import Findings, Kind
from glm53_mono.probe.snapshot import WINDOW, Requests, Tables

SCALE_BYTES = 4


ALIVE = 10
"""Tensors of 8-byte numbers that a probe has at once: its values, indices and masks, and those of its finding."""


def scratch_bytes(geometry: Geometry, longest: int) -> int:
    """Most bytes that a probed step holds beside its numbers.

    Args:
        longest: tokens of a request.
    """
    # one layer's states or latents, gathered
    state = MAX_ROWS * geometry.kda_heads * geometry.kda_head_dim**2 * torch.float32.itemsize
    latents = MAX_ROWS * WINDOW * geometry.latent * torch.bfloat16.itemsize
    # a finding in the windows of all layers, or among all pages of all pairs of a row and a request
    window = MAX_ROWS * WINDOW * len(geometry.dsa_layers)
    pages = MAX_ROWS * MAX_ROWS * -(-longest // geometry.page_tokens)
    return max(state, latents) + ALIVE * max(window, pages) * torch.int64.itemsize


def probe_prefix(
    findings: Findings, step: ObservedStep, requests: Requests, tables: Tables, geometry: Geometry
) -> None:
    """Everything that the step is about to read; zero rows only where the prefix has more than a page, since SGLang's
    warm-up requests, which have less, leave such rows."""
    _probe_window(findings, step, requests, tables, geometry)
    _probe_states(findings, step, requests, geometry, Kind.READ_STATE, zero=True)
    _probe_windows_of_convolution(findings, step, requests, geometry)
    _probe_ring(findings, step, requests, geometry)


def probe_written(
    findings: Findings, step: ObservedStep, requests: Requests, geometry: Geometry, hidden: Tensor
) -> None:
    """What the step has written, and its hidden states."""
    largest = _largest(hidden).view(requests.row.shape)
    active = requests.active[:, None]
    findings.add(Kind.HIDDEN, active & ~largest.isfinite(), largest, math.inf, request=requests.place, row=requests.row)
    if step.pools.latent:
        slots = step.inputs.out_cache_loc.clamp(0, step.pools.latent[0].shape[0] - 1)
        written = torch.stack([_largest(latent.index_select(0, slots)) for latent in step.pools.latent])
        written = written.view(len(geometry.dsa_layers), *requests.row.shape)
        findings.add(
            Kind.WRITTEN_LATENT,
            active & ((written == 0) | ~written.isfinite()),
            written,
            math.inf,
            request=requests.place,
            row=requests.row,
            layer=_layers(geometry.dsa_layers, written),
        )
    if step.inputs.mode == "decode":
        _probe_states(findings, step, requests, geometry, Kind.WRITTEN_STATE, zero=False)
    else:
        _probe_scratch(findings, step, requests, geometry)


def _probe_window(
    findings: Findings, step: ObservedStep, requests: Requests, tables: Tables, geometry: Geometry
) -> None:
    pools, seen, tokens, slots = step.pools, tables.window_seen, tables.window_tokens, tables.window_slots
    if not pools.latent:
        return
    total = pools.latent[0].shape[0]
    wrong = seen & ((slots < 1) | (slots >= total))
    findings.add(Kind.SLOT, wrong, slots, total - 1, request=requests.place, token=tokens)
    expected = tables.page_slots.gather(1, tokens // geometry.page_tokens) + tokens % geometry.page_tokens
    findings.add(Kind.SLOT_PLACE, seen & (slots != expected), slots, expected, request=requests.place, token=tokens)

    slots = slots.clamp(0, total - 1)
    grown = seen & (requests.committed[:, None] > geometry.page_tokens)
    largest = torch.stack([_largest(latent.index_select(0, slots.flatten())) for latent in pools.latent])
    largest = largest.view(-1, *slots.shape)
    named = {"request": requests.place, "layer": _layers(geometry.dsa_layers, largest), "token": tokens}
    findings.add(Kind.ZERO_LATENT, grown & (largest == 0), largest, 0, **named)
    findings.add(Kind.READ_LATENT, seen & ~largest.isfinite(), largest, math.inf, **named)

    pages, entries = slots // geometry.page_tokens, slots % geometry.page_tokens // geometry.pool
    first = geometry.page_pools * geometry.index_head_dim // SCALE_BYTES
    scales = torch.stack([index.view(torch.float32)[pages, first + entries] for index in pools.index])
    # a pool is closed by its last token
    closed = grown & (tokens % geometry.pool == geometry.pool - 1)
    findings.add(Kind.ZERO_POOL, closed & ~((scales > 0) & scales.isfinite()), scales, 0, **named)


def _probe_states(
    findings: Findings, step: ObservedStep, requests: Requests, geometry: Geometry, kind: Kind, *, zero: bool
) -> None:
    """The committed states of all layers; a row of a request's own is gathered layer by layer."""
    if not step.pools.state:
        return
    largest = torch.stack([_largest(state.index_select(0, requests.state_slots)) for state in step.pools.state])
    named = {"request": requests.place[:, 0], "layer": _layers(geometry.kda_layers, largest)}
    known = requests.active & (requests.committed > 0)
    findings.add(kind, known & ~largest.isfinite(), largest, math.inf, **named)
    if zero:
        grown = requests.active & (requests.committed > geometry.page_tokens)
        findings.add(Kind.ZERO_STATE, grown & (largest == 0), largest, 0, **named)


def _probe_windows_of_convolution(
    findings: Findings, step: ObservedStep, requests: Requests, geometry: Geometry
) -> None:
    if not step.pools.conv:
        return
    largest = torch.stack([_largest(window.index_select(0, requests.state_slots)) for window in step.pools.conv])
    known = requests.active & (requests.committed > 0)
    findings.add(
        Kind.READ_WINDOW,
        known & ~largest.isfinite(),
        largest,
        math.inf,
        request=requests.place[:, 0],
        layer=_layers(geometry.kda_layers, largest),
    )


def _probe_ring(findings: Findings, step: ObservedStep, requests: Requests, geometry: Geometry) -> None:
    """The entries of the unfinished pool alone: the others are left over from earlier tokens."""
    pools = step.pools
    if not pools.ring_key:
        return
    committed = requests.committed[:, None]
    tokens = committed // geometry.pool * geometry.pool + torch.arange(geometry.pool, device=committed.device)
    entries = tokens % pools.ring_length
    rows = requests.table_rows.clamp(max=pools.ring_key[0].shape[0] - 1)[:, None]
    keys, gates = (
        torch.stack([_largest(ring[rows, entries].flatten(0, 1)).view(entries.shape) for ring in rings])
        for rings in (pools.ring_key, pools.ring_gate)
    )
    largest = torch.maximum(keys, gates)
    findings.add(
        Kind.READ_RING,
        requests.active[:, None] & (tokens < committed) & ~largest.isfinite(),
        largest,
        math.inf,
        request=requests.place,
        layer=_layers(geometry.dsa_layers, largest),
        token=tokens,
    )


def _probe_scratch(findings: Findings, step: ObservedStep, requests: Requests, geometry: Geometry) -> None:
    """The states behind each request's last draft, into which all the others went."""
    scratch, rows = step.pools.state_scratch, step.inputs.scratch_rows
    if not scratch or rows is None:
        return
    rows = rows[: step.inputs.requests].long().clamp(0, scratch[0].shape[0] - 1)
    largest = torch.stack([_largest(states[:, -1].index_select(0, rows)) for states in scratch])
    findings.add(
        Kind.WRITTEN_STATE,
        requests.active & ~largest.isfinite(),
        largest,
        math.inf,
        request=requests.place[:, 0],
        layer=_layers(geometry.kda_layers, largest),
    )


def _largest(rows: Tensor) -> Tensor:
    """The largest magnitude of each row, [rows] in its dtype; NaN where the row has one."""
    return torch.linalg.vector_norm(rows.flatten(1), math.inf, dim=1)


def _layers(layers: tuple[int, ...], values: Tensor) -> Tensor:
    """Layer numbers along the first dimension of `values`, without a copy from the host."""
    numbers = torch.cat([torch.full((1,), layer, device=values.device) for layer in layers])
    return numbers.view(-1, *[1] * (values.dim() - 1))
