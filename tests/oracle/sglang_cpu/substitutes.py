"""PyTorch for the SGLang operations that exist only as CUDA code: agreement on these shows only right wiring."""

from __future__ import annotations

import functools
from typing import Any

import torch

INDEX_BLOCK = 64
"""Pooled keys of one page of the index cache (kpool_fp8_index.py:374-402)."""


@functools.cache
def sylvester_matrix(size: int) -> torch.Tensor:
    """The symmetric Hadamard matrix of Sylvester's order, fp32 [size, size]; `size` is a power of two."""
    if size == 1:
        return torch.ones(1, 1)
    half = sylvester_matrix(size // 2)
    return torch.cat([torch.cat([half, half], 1), torch.cat([half, -half], 1)], 0)


def exact_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`torch.nn.functional.linear` with the products added in fp64, rounded to fp32 and then to x's dtype."""
    out = x.double() @ weight.double().transpose(-1, -2)
    return (out if bias is None else out + bias.double()).float().to(x.dtype)


def exact_bmm(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """`torch.bmm` in the same way."""
    product = (a.double() @ b.double()).float().to(a.dtype)
    return product if out is None else out.copy_(product)


def rotate_activation(x: torch.Tensor) -> torch.Tensor:
    """The orthonormal Hadamard transform of the last dimension, rounded once (kernels/ops/quantization/hadamard.py)."""
    size = x.shape[-1]
    return (x.float() @ sylvester_matrix(size) * size**-0.5).to(x.dtype)


def expand_lengths(extend_lengths: torch.Tensor, lengths: torch.Tensor, *_sizes: int) -> torch.Tensor:
    """Every new token's own context length, int32 [sum of extend_lengths] (kernels/ops/attention/pad.py:369).

    Args:
        extend_lengths: new tokens of each request, [requests].
        lengths: context length of each request, its new tokens included, [requests].
    """
    rows = [
        torch.arange(total - new + 1, total + 1, dtype=torch.int32)
        for new, total in zip(extend_lengths.tolist(), lengths.tolist(), strict=True)
    ]
    return torch.cat(rows)


def pick_pools(
    scores: torch.Tensor, lengths: torch.Tensor, count: int, row_starts: torch.Tensor | None = None
) -> torch.Tensor:
    """The `count` best entries of each row, ties to the lower index, int32 [rows, count], -1 where a row has fewer.

    Args:
        scores: fp32 [rows, columns].
        lengths: entries of each row that count, [rows].
        count: entries to pick.
        row_starts: first column of each row's entries, [rows]; picks are relative to it.
    """
    picks = torch.full((scores.shape[0], count), -1, dtype=torch.int32)
    for row, length in enumerate(lengths.tolist()):
        start = 0 if row_starts is None else int(row_starts[row])
        kept = min(length, count)
        if length <= count:
            picks[row, :kept] = torch.arange(kept, dtype=torch.int32)
        else:
            order = scores[row, start : start + length].sort(descending=True, stable=True).indices
            picks[row, :kept] = order[:kept].to(torch.int32)
    return picks


def sparse_attention(
    q: torch.Tensor, kv: torch.Tensor, indices: torch.Tensor, sm_scale: float, d_v: int = 512
) -> torch.Tensor:
    """Attention of each row over its selected latents, fp32 with one rounding (`tilelang_sparse_fwd`).

    Args:
        q: absorbed queries, bf16 [rows, heads, latent].
        kv: latent cache, bf16 [slots, 1, latent].
        indices: slots of the selected tokens, [rows, 1, width], -1 where there is none.
        sm_scale: factor of the scores.
        d_v: leading values of a latent that are its value.

    Returns:
        bf16 [1, rows, heads, d_v].
    """
    slots = indices[:, 0].long()
    latents = kv[slots.clamp(min=0), 0].float()
    scores = torch.einsum("rhd,rsd->rhs", q.float(), latents) * sm_scale
    weights = scores.masked_fill((slots < 0)[:, None], float("-inf")).softmax(-1)
    return torch.einsum("rhs,rsd->rhd", weights, latents[..., :d_v]).to(q.dtype)[None]


class DeepGemm:
    """DeepGEMM's FP8 logits in fp32: key_scale * sum over heads of weight * relu(query . key)."""

    @staticmethod
    def get_num_sms() -> int:
        return 1

    @staticmethod
    def get_paged_mqa_logits_metadata(*_args: Any) -> None:
        return None

    @staticmethod
    def fp8_mqa_logits(
        q: torch.Tensor,
        keys_and_scales: tuple[torch.Tensor, torch.Tensor],
        weights: torch.Tensor,
        starts: torch.Tensor,
        ends: torch.Tensor,
        clean_logits: bool = True,
    ) -> torch.Tensor:
        """Logits of rows against one flat list of keys, fp32 [rows, keys]; -inf outside [starts, ends)."""
        keys, scales = keys_and_scales
        dots = torch.relu(torch.einsum("rhd,kd->rhk", q.float(), keys.float()))
        logits = (dots * weights[..., None]).sum(1) * scales
        column = torch.arange(keys.shape[0])
        outside = (column < starts[:, None]) | (column >= ends[:, None])
        return logits.masked_fill(outside, float("-inf")) if clean_logits else logits

    @staticmethod
    def fp8_paged_mqa_logits(
        q: torch.Tensor,
        cache: torch.Tensor,
        weights: torch.Tensor,
        context_lengths: torch.Tensor,
        block_tables: torch.Tensor,
        _schedule: None,
        _max_length: int,
        clean_logits: bool = False,
    ) -> torch.Tensor:
        """Logits of rows against the keys of their pages, fp32 [rows, pages * 64]; -inf beyond a row's length."""
        width = q.shape[-1]
        pages = cache.reshape(cache.shape[0], -1)[block_tables.long().clamp(min=0)]
        key_bytes = pages[..., : INDEX_BLOCK * width].contiguous()
        keys = key_bytes.view(torch.float8_e4m3fn).float().reshape(q.shape[0], -1, width)
        scales = pages[..., INDEX_BLOCK * width :].contiguous().view(torch.float32).reshape(q.shape[0], -1)
        dots = torch.relu(torch.einsum("rhd,rkd->rhk", q[:, 0].float(), keys))
        logits = (dots * weights[..., None]).sum(1) * scales
        beyond = torch.arange(logits.shape[1]) >= context_lengths.view(-1, 1)
        return logits.masked_fill(beyond, float("-inf"))


def select_pooled_history(
    logits: torch.Tensor, group_lengths: torch.Tensor, kpool: int, topk: int, **options: Any
) -> torch.Tensor:
    """SGLang's own unfused selection, without the guards before it that ask for a GPU and the real index_topk."""
    from sglang.srt.layers.attention.dsa import kpool_fp8_index

    options.pop("topk_v2_plan", None)
    defaults = dict.fromkeys(
        ("page_table", "page_table_row_index", "topk_offsets", "seq_lens", "row_starts", "out_rows")
    )
    return kpool_fp8_index._kpool_topk_unfused(
        logits=logits,
        group_lengths=group_lengths,
        kpool=kpool,
        topk=topk,
        group_topk=topk // kpool,
        **(defaults | options),
    )


def clamped_swiglu(gate_up: torch.Tensor, out: torch.Tensor, limit: float) -> None:
    """SGLang's Triton kernel of ROCm, which rounds as its CUDA kernel does (silu_and_mul_clamp_hip.py); writes `out`.

    All rows go as one long row: the kernel works element by element, and the interpreter's time goes by programs.
    """
    from sglang.kernels.ops.activation.silu_and_mul_clamp_hip import silu_and_mul_clamp_triton

    gate, up = gate_up.chunk(2, -1)
    one_row = torch.cat([gate.reshape(1, -1), up.reshape(1, -1)], -1)
    out.copy_(silu_and_mul_clamp_triton(one_row, limit).view_as(out))


def routed_experts(method: Any, layer: Any, dispatch_output: Any) -> Any:
    """The routed experts, rounded as the Triton runner rounds (fused_moe_triton_kernels.py:631-634, :1240-1293).

    gate_up and the activation are bf16; the down projection stays fp32 until its router weight is applied; the slots of
    a token are added in fp32 and scaled before the last rounding.
    """
    from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput

    x = dispatch_output.hidden_states
    weights, experts, _ = dispatch_output.topk_output
    config = method.moe_runner_config
    rows, slots = experts.shape
    out = torch.empty(rows, slots, x.shape[1])
    for expert in experts.unique().tolist():
        row, slot = (experts == expert).nonzero(as_tuple=True)
        gate_up = exact_linear(x[row], layer.w13_weight[expert])
        activated = gate_up.new_empty(len(row), gate_up.shape[1] // 2)
        clamped_swiglu(gate_up, activated, config.swiglu_limit)
        down = exact_linear(activated.float(), layer.w2_weight[expert]) * weights[row, slot, None].float()
        out[row, slot] = down.to(x.dtype).float()
    return StandardCombineInput(hidden_states=(out.sum(1) * (config.routed_scaling_factor or 1.0)).to(x.dtype))


class TorchWithoutPinning:
    """`torch` as a module sees it, except that `torch.tensor` ignores `pin_memory`, which needs a GPU."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def tensor(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        del pin_memory
        return torch.tensor(*args, **kwargs)
