"""What probes have found, counted on the device: for each kind how often, and where it was last."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum

import numpy as np
import torch
from torch import Tensor


class Kind(Enum):
    """What a probe may find: what it is, and what `found` and `expected` are there."""

    LENGTH = "a length that its table cannot hold: {found} tokens, 1 to {expected} fit"
    POSITION = "a position that does not follow from the length: {found}, should be {expected}"
    PADDING = "a request with a state and a table, but without a slot to write to: state slot {found}, slot {expected}"
    REQUEST_ROW = "a request row that no request has: {found}, should be 1 to {expected}"
    STATE_SLOT = "a state slot that no request has: {found}, should be 1 to {expected}"
    SLOT = "a token of the request without a slot of its own: {found}, should be 1 to {expected}"
    SLOT_PLACE = "a slot that is not the token's place in its page: {found}, should be {expected}"
    DUPLICATE_PAGE = "a page that stands twice in a request's table: page {found}, before it at token {expected}"
    WRITE_SLOT = "a row that writes to another slot than its table says: {found}, should be {expected}"
    SHARED_ROW = "two requests with one row of the table: {found}, also that of request {expected}"
    SHARED_STATE = "two requests with one state slot: {found}, also that of request {expected}"
    SHARED_SLOT = "two rows that write to one slot: {found}, also that of row {expected}"
    SHARED_PAGE = "a row that writes to a page of another request: page {found}, request {expected}"
    SHARED_SCRATCH = "two requests with one row of verify scratch: {found}, also that of request {expected}"
    TRACKED_STATE = "a state that is kept in the slot of another request: slot {found}, request {expected}"
    POOL_START = "a pool plan that starts elsewhere than the step: {found}, should be {expected}"
    POOL_LENGTH = "a pool plan with another number of pools than the length has: {found}, should be {expected}"
    ZERO_LATENT = "a latent of the prefix that is all zero: largest value {found}, should be above {expected}"
    ZERO_POOL = "a pooled key of the prefix that was never written: scale {found}, should be above {expected}"
    ZERO_STATE = "a recurrent state that is all zero behind a page of tokens: largest value {found}, not {expected}"
    READ_LATENT = "a latent of the prefix that is not finite: largest value {found}, should be below {expected}"
    READ_STATE = "a recurrent state that is not finite before the step: largest value {found}, not below {expected}"
    READ_WINDOW = "a convolution window that is not finite: largest value {found}, should be below {expected}"
    READ_RING = "a ring entry of the unfinished pool that is not finite: largest value {found}, not below {expected}"
    WRITTEN_LATENT = "a latent that the step left zero or not finite: largest value {found}, 0 to {expected} apart"
    WRITTEN_STATE = "a recurrent state that is not finite after the step: largest value {found}, not below {expected}"
    HIDDEN = "hidden states that are not finite: largest value {found}, should be below {expected}"


KINDS = tuple(Kind)
_PLACES = {kind: place for place, kind in enumerate(KINDS)}


class Field(IntEnum):
    """What is kept of a kind; places that a finding does not have are -1."""

    COUNT = 0
    STEP = 1
    REQUEST = 2
    ROW = 3
    LAYER = 4
    TOKEN = 5
    FOUND = 6
    EXPECTED = 7


STEPS = len(KINDS)
"""Row of the numbers whose first one counts the steps that were probed."""

NUMBERS_SHAPE = (len(KINDS) + 1, len(Field))
NUMBER_BYTES = torch.float64.itemsize


@dataclass(frozen=True)
class Finding:
    """A kind of finding, and the last one of it.

    Attributes:
        count: how many there were.
        step: number of the probed step.
        request, row: places in the step's batch; -1 where the finding has none.
        layer: of the model; -1 likewise.
        token: position in the request; -1 likewise.
        found, expected: both values; the kind says which.
    """

    kind: Kind
    count: int
    step: int
    request: int
    row: int
    layer: int
    token: int
    found: float
    expected: float

    def __str__(self) -> str:
        named = (("request", self.request), ("row", self.row), ("layer", self.layer), ("token", self.token))
        places = ", ".join(f"{name} {place}" for name, place in named if place >= 0)
        values = self.kind.value.format(found=_shown(self.found), expected=_shown(self.expected))
        return f"{places}: {values}"


class Findings:
    """Counts on the device; every method enqueues work and waits for nothing.

    Args:
        device: where steps run.
    """

    def __init__(self, device: torch.device) -> None:
        self._numbers = torch.zeros(NUMBERS_SHAPE, dtype=torch.float64, device=device)
        self._host = torch.zeros(NUMBERS_SHAPE, dtype=torch.float64, pin_memory=device.type != "cpu")
        self._none = torch.full((1,), -1, device=device)

    @property
    def step(self) -> Tensor:
        """Steps probed so far, a number on the device: [] float64."""
        return self._numbers[STEPS, Field.COUNT]

    def next_step(self) -> None:
        """One step more is probed."""
        self.step.add_(1)

    def add(
        self,
        kind: Kind,
        wrong: Tensor,
        found: Tensor,
        expected: Tensor | float,
        *,
        request: Tensor | None = None,
        row: Tensor | None = None,
        layer: Tensor | None = None,
        token: Tensor | None = None,
    ) -> None:
        """Counts what is wrong, and keeps the first of it as the kind's last finding.

        Args:
            wrong: bool of any shape; all others are broadcast to it.
        """
        if not isinstance(expected, Tensor):
            # a tensor of one value is written by a kernel; `torch.tensor` would copy it from the host
            expected = torch.full((1,), float(expected), dtype=torch.float64, device=wrong.device)
        flat = wrong.flatten()
        first = flat.to(torch.int32).argmax().view(1)

        def at_first(value: Tensor | None) -> Tensor:
            spread = (self._none if value is None else value).expand(wrong.shape)
            return spread.flatten().index_select(0, first).double()

        kept = self._numbers[_PLACES[kind]]
        count = flat.sum()
        places = [at_first(value) for value in (request, row, layer, token, found, expected)]
        last = torch.cat((kept[:1] + count, self.step.view(1), *places))
        kept.copy_(torch.where(count > 0, last, kept))

    def publish(self) -> None:
        """Hands the numbers to the host, in the order of the step's other work."""
        self._host.copy_(self._numbers, non_blocking=True)

    @property
    def host_numbers(self) -> np.ndarray:
        """What was last handed over, [kinds + 1, fields] float64; reading it calls no device."""
        return self._host.numpy()


def read_findings(numbers: np.ndarray) -> list[Finding]:
    """The kinds that were found, from the host's copy of the numbers."""
    found = []
    for kind, values in zip(KINDS, numbers, strict=False):
        if values[Field.COUNT]:
            whole = (int(values[field]) for field in list(Field)[: Field.FOUND])
            found.append(Finding(kind, *whole, float(values[Field.FOUND]), float(values[Field.EXPECTED])))
    return found


def steps_probed(numbers: np.ndarray) -> int:
    """Steps that had been probed when the numbers were handed over."""
    return int(numbers[STEPS, Field.COUNT])


def _shown(value: float) -> str:
    return f"{value:.0f}" if float(value).is_integer() else f"{value:.4g}"
