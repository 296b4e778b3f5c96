"""Probes of a step's own tensors: lengths, positions, slots, tables, and what requests share that they must not."""

from __future__ import annotations

import torch
from torch import Tensor

from glm53_mono.geometry import Geometry
from glm53_mono.observers import ObservedStep
from glm53_mono.probe.findings import Findings, Kind
from glm53_mono.probe.snapshot import Requests, Tables
from glm53_mono.upstream.step import pool_plan


def probe_tables(
    findings: Findings, step: ObservedStep, requests: Requests, tables: Tables, geometry: Geometry
) -> None:
    """Everything that can be asked without reading a cache; the table of pages as a whole, slots in the step's rows."""
    _lengths(findings, step, requests)
    _request_places(findings, step, requests)
    _pages(findings, step, requests, tables, geometry)
    _written_slots(findings, step, requests, tables)
    _plan(findings, step, requests, geometry)


def _lengths(findings: Findings, step: ObservedStep, requests: Requests) -> None:
    inputs, active, place = step.inputs, requests.active, requests.place[:, 0]
    longest = inputs.req_to_token.shape[1]
    shortest = 1 if inputs.mode == "decode" else 0
    wrong = (inputs.seq_lens < shortest) | (inputs.seq_lens > longest)
    findings.add(Kind.LENGTH, active & wrong, inputs.seq_lens, longest, request=place)
    first = inputs.seq_lens - shortest
    expected = first[:, None] + torch.arange(inputs.tokens_per_request, device=first.device)
    positions = inputs.positions.view(expected.shape)
    findings.add(
        Kind.POSITION,
        active[:, None] & (positions != expected),
        positions,
        expected,
        request=requests.place,
        row=requests.row,
    )


def _request_places(findings: Findings, step: ObservedStep, requests: Requests) -> None:
    inputs, pools, active, place = step.inputs, step.pools, requests.active, requests.place[:, 0]
    slots, rows = inputs.state_slots.long(), inputs.request_rows
    locations = inputs.out_cache_loc.view(inputs.requests, -1)[:, 0]
    findings.add(Kind.PADDING, ~active & (slots > 0) & (rows > 0), slots, locations, request=place)
    last_row, last_slot = inputs.req_to_token.shape[0] - 1, pools.state[0].shape[0] - 1 if pools.state else 0
    findings.add(Kind.REQUEST_ROW, active & ((rows < 1) | (rows > last_row)), rows, last_row, request=place)
    if pools.state:
        findings.add(Kind.STATE_SLOT, active & ((slots < 1) | (slots > last_slot)), slots, last_slot, request=place)
        _shared(findings, Kind.SHARED_STATE, slots, active, place)
    _shared(findings, Kind.SHARED_ROW, rows, active, place)
    if inputs.scratch_rows is not None:
        _shared(findings, Kind.SHARED_SCRATCH, inputs.scratch_rows[: inputs.requests].long(), active, place)
    if inputs.track_slots is not None and inputs.track_mask is not None:
        kept = active & inputs.track_mask & (inputs.track_slots > 0)
        same = kept[:, None] & active & (inputs.track_slots[:, None] == slots) & ~_diagonal(place)
        findings.add(Kind.TRACKED_STATE, same, inputs.track_slots[:, None], place, request=requests.place)


def _shared(
    findings: Findings, kind: Kind, values: Tensor, active: Tensor, place: Tensor, name: str = "request"
) -> None:
    """Values of which no two may be the same; the second is the one that is named."""
    earlier = place[:, None] > place
    same = active[:, None] & active & (values[:, None] == values) & earlier
    findings.add(kind, same, values[:, None], place, **{name: place[:, None]})


def _diagonal(place: Tensor) -> Tensor:
    return place[:, None] == place


def _pages(findings: Findings, step: ObservedStep, requests: Requests, tables: Tables, geometry: Geometry) -> None:
    """The first slot of each page of a request, and of the row's own page."""
    inputs, page, first_slots = step.inputs, geometry.page_tokens, tables.page_slots
    starts = torch.arange(first_slots.shape[1], device=first_slots.device) * page
    used = requests.active[:, None] & (starts < requests.committed[:, None])
    slots = step.pools.latent[0].shape[0] if step.pools.latent else 0
    if slots:
        wrong = used & ((first_slots < 1) | (first_slots >= slots))
        findings.add(Kind.SLOT, wrong, first_slots, slots - 1, request=requests.place, token=starts)
    pages = first_slots // page
    # sorted, a page that stands twice is its own neighbour; what is not used differs from everything
    ordered, columns = torch.where(used, pages, -1 - starts).sort(dim=1, stable=True)
    twice = ordered[:, 1:] == ordered[:, :-1]
    findings.add(
        Kind.DUPLICATE_PAGE,
        twice,
        ordered[:, 1:],
        columns[:, :-1] * page,
        request=requests.place,
        token=columns[:, 1:] * page,
    )
    own = inputs.out_cache_loc.view(requests.row.shape) // page
    written = own.flatten()
    writer = requests.place.expand_as(requests.row).flatten()
    same = (written[:, None, None] == pages) & used & (writer[:, None, None] != requests.place)
    same &= requests.active.index_select(0, writer)[:, None, None]
    findings.add(
        Kind.SHARED_PAGE,
        same,
        written[:, None, None],
        requests.place,
        request=writer[:, None, None],
        row=requests.row.flatten()[:, None, None],
        token=starts,
    )


def _written_slots(findings: Findings, step: ObservedStep, requests: Requests, tables: Tables) -> None:
    written, listed, tokens = step.inputs.out_cache_loc.view(requests.row.shape), tables.own_slots, tables.own_tokens
    findings.add(
        Kind.WRITE_SLOT,
        requests.active[:, None] & (written != listed),
        written,
        listed,
        request=requests.place,
        row=requests.row,
        token=tokens,
    )
    active = requests.active[:, None].expand_as(written).flatten()
    _shared(findings, Kind.SHARED_SLOT, written.flatten(), active, requests.row.flatten(), "row")


def _plan(findings: Findings, step: ObservedStep, requests: Requests, geometry: Geometry) -> None:
    """SGLang's own plan of pools, which it makes from the same lengths."""
    plan = pool_plan(step.backends, step.inputs)
    if plan is None:
        return
    first = step.inputs.seq_lens - (1 if step.inputs.mode == "decode" else 0)
    place = requests.place[:, 0]
    starts = plan.starts.long()
    findings.add(Kind.POOL_START, requests.active & (starts != first), starts, first, request=place)
    if plan.pools is not None:
        steps = torch.arange(1, step.inputs.tokens_per_request + 1, device=first.device)
        expected = (first[:, None] + steps) // geometry.pool
        pools = plan.pools.long().view(expected.shape)
        findings.add(
            Kind.POOL_LENGTH,
            requests.active[:, None] & (pools != expected),
            pools,
            expected,
            request=requests.place,
            row=requests.row,
        )
