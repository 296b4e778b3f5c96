"""SGLang's parts of a layer, each run by itself on inputs that the caller gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from glm53_mono.upstream.tensors import UpstreamError

ExpertChoice = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
TokenChoice = Callable[[Tensor, bool], Tensor]

SCRATCH_NUMBERS = 2
"""Zeroed numbers that SGLang lends each layer (glm5_next.py: Glm5NextModel.forward)."""


@dataclass(frozen=True)
class BranchInput:
    """What a branch reads of the streams, and how its output goes back.

    Attributes:
        mixed: [rows, hidden] bf16, normed.
        post: [rows, 4] fp32.
        comb: [rows, 16] fp32, from stream i to stream o at 4 i + o.
    """

    mixed: Tensor
    post: Tensor
    comb: Tensor


class Parts:
    """The parts of SGLang's model during one of its forwards.

    Args:
        model: SGLang's loaded `Glm5NextForConditionalGeneration`.
        positions, forward_batch: of the step, as its forward gets them.
    """

    def __init__(self, model: Any, positions: Tensor, forward_batch: Any) -> None:
        self._model = model
        self._layers = model.model.layers
        self._batch = forward_batch
        self._positions = forward_batch.mrope_positions if model.is_mrope_enabled else positions

    def embedded(self, input_ids: Tensor) -> Tensor:
        """[rows, hidden] bf16."""
        return self._model.model.embed_tokens(input_ids)

    def attention_input(self, layer: int, streams: Tensor) -> BranchInput:
        """hc_pre and the norm before a layer's attention; streams [rows, 4 hidden] bf16."""
        own = self._layers[layer]
        return self._input(own.hc_attn_pre, own.input_layernorm, streams)

    def ffn_input(self, layer: int, streams: Tensor) -> BranchInput:
        """hc_pre and the norm before a layer's FFN; streams [rows, 4 hidden] bf16."""
        own = self._layers[layer]
        return self._input(own.hc_ffn_pre, own.post_attention_layernorm, streams)

    def attention(self, layer: int, mixed: Tensor) -> Tensor:
        """A layer's attention, [rows, hidden] bf16; it writes the layer's caches as SGLang's forward does."""
        from sglang.srt.layers.layer_boundary.adapters.attention import AttentionInputs, get_attn_tp_context
        from sglang.srt.utils.common import BumpAllocator

        own, context = self._layers[layer], get_attn_tp_context()
        with context.maybe_input_scattered(self._batch):
            if not own.is_linear_attn:
                context.set_attn_inputs(AttentionInputs(mixed, self._batch, own.self_attn.prepare_qkv_latent))
            output = own.self_attn(
                positions=self._positions,
                hidden_states=mixed,
                forward_batch=self._batch,
                zero_allocator=BumpAllocator(SCRATCH_NUMBERS, torch.float32, mixed.device),
                input_on_attn_tp_slices=own.attn_boundary.input_on_attn_tp_slices,
                prev_topk_indices=None,
            )
            context.clear_attn_inputs()
        return _tensor(output[0] if isinstance(output, tuple) else output, f"the attention of layer {layer}")

    def ffn(self, layer: int, mixed: Tensor) -> Tensor:
        """A layer's FFN, [rows, hidden] bf16."""
        return _tensor(self._layers[layer].mlp(mixed, self._batch, None), f"the FFN of layer {layer}")

    def updated(self, layer: int, output: Tensor, streams: Tensor, comb: Tensor, post: Tensor) -> Tensor:
        """hc_post: the streams [rows, 4 hidden] bf16 after a branch's output [rows, hidden] bf16."""
        return self._layers[layer].hc_post(output, streams, comb, post)

    def final(self, streams: Tensor) -> Tensor:
        """The mean of the streams, normed: [rows, hidden] bf16 (mhc.py: hc_contract)."""
        from sglang.kernels.ops.layernorm.mhc import hc_contract

        norm = self._model.model.norm
        return norm(hc_contract(streams, streams.shape[1] // norm.weight.shape[0]))

    @contextmanager
    def experts_chosen_by(self, layer: int, choose: ExpertChoice) -> Iterator[None]:
        """Has `choose` see, and replace, the experts and weights that a layer's rows get, both [rows, chosen]."""

        def steer(_module: Any, _arguments: Any, output: Any) -> Any:
            if not hasattr(output, "topk_ids"):
                raise UpstreamError(
                    f"layer {layer} hands {type(output).__name__} to its experts, which then choose unseen: serve with "
                    "--moe-runner-backend triton, or without SGLANG_AMD_MONO_CHECK"
                )
            weights, ids = choose(output.topk_weights, output.topk_ids)
            return output._replace(topk_weights=weights, topk_ids=ids)

        hook = self._layers[layer].mlp.topk.register_forward_hook(steer)
        try:
            yield
        finally:
            hook.remove()

    @contextmanager
    def tokens_chosen_by(self, layer: int, choose: TokenChoice) -> Iterator[None]:
        """Has `choose` see, and replace, what a layer's rows attend: int32 [rows, selection width], -1 for none.

        Its second argument says whether these are slots of the cache; if not, they are positions.
        """
        from sglang.srt.layers.attention.dsa.dsa_indexer_kpool import _should_fuse_kpool_topk
        from sglang.srt.model_executor.forward_context import get_attn_backend

        metadata = get_attn_backend().get_indexer_metadata(layer, self._batch)
        are_slots = bool(_should_fuse_kpool_topk(metadata))

        def steer(_module: Any, _arguments: Any, output: Any) -> Any:
            return choose(output, are_slots)

        hook = self._layers[layer].self_attn.indexer.register_forward_hook(steer)
        try:
            yield
        finally:
            hook.remove()

    def _input(self, read: Callable[..., Any], norm: Any, streams: Tensor) -> BranchInput:
        mixed, comb, post, is_normed = read(streams, norm.weight.data, norm.variance_epsilon)
        return BranchInput(mixed if is_normed else norm(mixed), post, comb)


def _tensor(output: Any, name: str) -> Tensor:
    if not isinstance(output, Tensor):
        raise UpstreamError(f"{name} returns {type(output).__name__}, an unfinished sum, not a tensor")
    return output
