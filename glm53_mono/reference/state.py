"""What a step reads besides weights: its inputs as SGLang hands them over, and the caches in SGLang's layouts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Literal

import torch
from torch import Tensor

from glm53_mono.geometry import Geometry
from glm53_mono.reference.index_cache import KeyLayout

Mode = Literal["decode", "target_verify"]

PADDED_SLOT = -1
"""The mamba slot of a request that only fills up a captured batch."""

PADDED_LOCATION = 0
"""The cache slot of a padded row: the first slot of the padding page."""


@dataclass(frozen=True)
class StepInputs:
    """One decode or target_verify step; rows are request-major, `tokens_per_request` consecutive rows each.

    Tensors have the names, dtypes and meanings of SGLang's ForwardBatch.
    """

    mode: Mode
    tokens_per_request: int
    input_ids: Tensor
    """[rows] i64; stale in padded rows."""
    positions: Tensor
    """[rows] i64."""
    seq_lens: Tensor
    """[requests] i64: decode counts the current token, target_verify only the committed ones."""
    req_pool_indices: Tensor
    """[requests] i64: rows of `req_to_token` and of the compress ring."""
    out_cache_loc: Tensor
    """[rows] i64: the slot each token is written to; 0 is padding."""
    mamba_slots: Tensor
    """[requests] i32: slots of the convolution windows and recurrent states; -1 is padding."""
    verify_rows: Tensor
    """[requests] i32: rows of the verify scratch; target_verify alone reads it."""
    req_to_token: Tensor
    """[request rows, longest context] i32: slot of each request's token by position."""

    def __post_init__(self) -> None:
        if self.mode not in ("decode", "target_verify"):
            raise ValueError(f"mode {self.mode!r} is neither 'decode' nor 'target_verify'")
        if self.mode == "decode" and self.tokens_per_request != 1:
            raise ValueError(f"a decode step has 1 token a request, not {self.tokens_per_request}")
        for name in ("input_ids", "positions", "out_cache_loc"):
            self._check_length(name, self.rows)
        for name in ("seq_lens", "req_pool_indices", "mamba_slots", "verify_rows"):
            self._check_length(name, self.requests)

    def _check_length(self, name: str, length: int) -> None:
        found = tuple(getattr(self, name).shape)
        if found != (length,):
            raise ValueError(f"{name} has shape {found}, this step wants ({length},)")

    @property
    def requests(self) -> int:
        """Requests of the step, padded ones included."""
        return self.seq_lens.shape[0]

    @property
    def rows(self) -> int:
        """Tokens of the step, padded ones included."""
        return self.requests * self.tokens_per_request

    @property
    def first_positions(self) -> Tensor:
        """[requests] i64: position of each request's first token in this step."""
        return self.seq_lens - 1 if self.mode == "decode" else self.seq_lens

    @property
    def row_requests(self) -> Tensor:
        """[rows] i64: the request of each row."""
        return torch.arange(self.requests, device=self.seq_lens.device).repeat_interleave(self.tokens_per_request)

    @property
    def row_lengths(self) -> Tensor:
        """[rows] i64: tokens a row sees, itself included."""
        own = torch.arange(1, self.tokens_per_request + 1, device=self.seq_lens.device)
        return (self.first_positions[:, None] + own).flatten()

    @property
    def linear_active(self) -> Tensor:
        """[requests] bool: requests that the KDA layers serve (causal_conv1d_triton.py:688, fused_recurrent.py:452)."""
        return self.mamba_slots != PADDED_SLOT

    @property
    def sparse_active(self) -> Tensor:
        """[requests] bool: requests that the MLA layers serve.

        A request is skipped by its first row: its slot is padding, or its position does not precede its length
        (kpool_fp8_index.py:1298-1304 decode, :1829-1831 target_verify).
        """
        first = slice(None, None, self.tokens_per_request)
        active = self.out_cache_loc[first] != PADDED_LOCATION
        if self.mode == "decode":
            active &= (self.positions >= 0) & (self.positions < self.seq_lens)
        return active


@dataclass(frozen=True)
class Caches:
    """Every cache that a step or its commit touches."""

    conv: Tensor
    """[KDA layers, slots + 1, conv_history, conv_channels] bf16: the last inputs of the convolution, oldest first."""
    temporal: Tensor
    """[KDA layers, slots + 1, kda_heads, V, K] fp32: the recurrent states."""
    intermediate_ssm: Tensor
    """[KDA layers, verify rows + 1, draft tokens, kda_heads, V, K] fp32: the state after each draft token."""
    intermediate_conv: Tensor
    """[KDA layers, verify rows + 1, draft tokens, conv_history, conv_channels] bf16: the window after each draft."""
    latent: list[Tensor]
    """A DSA layer each: [cache slots, 1, latent] bf16."""
    index: list[Tensor]
    """A DSA layer each: [pages, index_page_bytes] uint8, the pooled keys and their scales."""
    ring_key: list[Tensor]
    """A DSA layer each: [request rows + 1, pool + draft tokens, index_head_dim] bf16, by position modulo its size."""
    ring_gate: list[Tensor]
    """The same for the pooling gates."""
    layout: KeyLayout = "linear"
    """How the pooled keys of a page lie: `linear` on CUDA, `tiled` on ROCm."""

    @classmethod
    def empty(
        cls,
        geometry: Geometry,
        *,
        mamba_slots: int,
        request_rows: int,
        pages: int,
        draft_tokens: int = 0,
        verify_rows: int = 0,
        layout: KeyLayout = "linear",
        device: torch.device | str = "cpu",
    ) -> Caches:
        """Caches full of zeros.

        Args:
            geometry: sizes of one rank.
            mamba_slots: requests with a recurrent state; one padding slot (0) comes on top.
            request_rows: rows of `req_to_token`; the ring has one more.
            pages: pages of the KV allocator, the padding page (0) included.
            draft_tokens: tokens of one verify step's request; 0 without speculation.
            verify_rows: requests of one verify step at most; one more row comes on top.
            layout: of the pooled keys.
            device: where the tensors live.
        """
        kda, dsa = len(geometry.kda_layers), len(geometry.dsa_layers)
        state = (geometry.kda_heads, geometry.kda_head_dim, geometry.kda_head_dim)
        window = (geometry.conv_history, geometry.conv_channels)
        ring = (request_rows + 1, geometry.pool + draft_tokens, geometry.index_head_dim)

        def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            conv=zeros(kda, mamba_slots + 1, *window),
            temporal=zeros(kda, mamba_slots + 1, *state, dtype=torch.float32),
            intermediate_ssm=zeros(kda, verify_rows + 1, draft_tokens, *state, dtype=torch.float32),
            intermediate_conv=zeros(kda, verify_rows + 1, draft_tokens, *window),
            latent=[zeros(pages * geometry.page_tokens, 1, geometry.latent) for _ in range(dsa)],
            index=[zeros(pages, geometry.index_page_bytes, dtype=torch.uint8) for _ in range(dsa)],
            ring_key=[zeros(*ring) for _ in range(dsa)],
            ring_gate=[zeros(*ring) for _ in range(dsa)],
            layout=layout,
        )

    def clone(self) -> Caches:
        """A copy that shares no memory."""
        copies = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor):
                copies[field.name] = value.clone()
            elif isinstance(value, list):
                copies[field.name] = [tensor.clone() for tensor in value]
        return replace(self, **copies)

    def poison(self) -> None:
        """Fill every cache with NaN (0x7F in the index pages: an e4m3 NaN), so that what is read unwritten shows."""
        for _, tensor in self.tensors():
            tensor.fill_(0x7F if tensor.dtype == torch.uint8 else float("nan"))

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Each cache tensor with its name: `conv`, ..., `latent.0`, `latent.1`, ..."""
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor):
                yield field.name, value
            elif isinstance(value, list):
                yield from ((f"{field.name}.{i}", tensor) for i, tensor in enumerate(value))
