"""SGLang's GLM-5.3-Flash with its pools and attention backends: forwards with a trace of every layer, and commits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from glm53_mono.cli.parts import LayerTrace, StepTrace
from glm53_mono.kernels import interpreter
from glm53_mono.kernels.faster_interpreter import with_room_for_frames
from glm53_mono.reference.state import Caches

from . import batches, context, patches, pools
from .batches import Batch


@dataclass
class SglangModel:
    """SGLang's model on the CPU. Make one with `serving`, which also ends what SGLang keeps for the whole process."""

    model: Any
    runner: Any
    backend: Any
    streams: int
    applied: tuple[patches.Patch | patches.StandIn, ...]
    _seen: list[dict[str, torch.Tensor]] = field(default_factory=list)

    def forward(self, batch: Batch) -> StepTrace:
        """Run the batch through SGLang's own layers; its caches change as they do in a server.

        An extend or decode batch commits its tokens; a verify batch commits nothing until `commit`.
        """
        from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

        batches.enter_tables(self.runner, batch)
        forward = batches.forward_batch(self.runner, batch)
        for seen in self._seen:
            seen.clear()
        with torch.no_grad(), forward_context(ForwardContext(attn_backend=self.backend)):
            hidden = with_room_for_frames(lambda: self._hidden_states(forward))
            logits = torch.nn.functional.linear(hidden, self.model.lm_head.weight)
        if batch.mode != "verify":
            for request, ids in zip(batch.requests, batch.input_ids, strict=True):
                request.tokens.extend(ids)
        return StepTrace([self._layer_trace(seen) for seen in self._seen], hidden, logits)

    def commit(self, batch: Batch, accepted: Sequence[int]) -> None:
        """Commit the last verify batch: the first token of each request and `accepted` drafts after it."""
        steps = torch.tensor(accepted)
        self.backend.update_mamba_state_after_mtp_verify(steps, None, None, self.model)
        for request, ids, count in zip(batch.requests, batch.input_ids, accepted, strict=True):
            request.tokens.extend(ids[: count + 1])

    def _hidden_states(self, forward: Any) -> torch.Tensor:
        self.backend.init_forward_metadata(forward)
        return self.model.model(forward.input_ids, forward.positions, forward)

    @property
    def caches(self) -> Caches:
        """SGLang's own pools, not copies, under the names of our reference."""
        return pools.caches_of(self.runner)

    @property
    def req_to_token(self) -> torch.Tensor:
        """SGLang's table of KV slots by request row and position, int32, not a copy."""
        return self.runner.req_to_token_pool.req_to_token

    def _layer_trace(self, seen: dict[str, torch.Tensor]) -> LayerTrace:
        rows, width = seen["attn_in"].shape
        streams_in = seen["streams_in"]
        # The first layer gets the bare embedding, which SGLang spreads over the streams inside (mhc.py:1864).
        streams_in = streams_in.view(rows, -1, width).expand(rows, self.streams, width)
        streams_out = seen["streams_out"]
        if streams_out.shape[1] != width:
            streams_out = streams_out.view(rows, self.streams, width)
        return LayerTrace(**{**seen, "streams_in": streams_in, "streams_out": streams_out})

    def _watch(self) -> None:
        """Record what every layer's parts read and return."""
        for layer in self.model.model.layers:
            seen: dict[str, torch.Tensor] = {}
            self._seen.append(seen)
            _watch_layer(layer, seen)


@contextmanager
def serving(
    config: dict[str, Any],
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    requests: int,
    max_context: int,
    pages: int,
    draft_tokens: int,
    place: context.Place | None = None,
) -> Iterator[SglangModel]:
    """Build SGLang's model, load it with SGLang's own loader, and give it pools.

    Args:
        config: the contents of config.json.
        tensors: checkpoint names and values.
        requests: request rows and mamba slots, the padding ones not counted.
        max_context: tokens a request may have.
        pages: KV pages of 256 tokens, the padding page 0 not counted.
        draft_tokens: tokens a verify step checks for each request, the bonus token included.
        place: of this process among those that share the model; left out, it has the whole one.

    Raises:
        context.ContextError: this process cannot run SGLang on the CPU.
        ValueError: a parameter that the checkpoint left unset.
    """
    interpreter.repair()
    with context.cpu_server(draft_tokens, place), patches.applied() as applied:
        sglang_config = _sglang_config(config)
        model = _load(sglang_config, tensors)
        runner = pools.build_runner(
            sglang_config, requests=requests, max_context=max_context, pages=pages, draft_tokens=draft_tokens
        )
        backend = pools.build_backend(runner)
        served = SglangModel(model, runner, backend, sglang_config.text_config.hc_mult, applied)
        served._watch()
        yield served


def _sglang_config(config: dict[str, Any]) -> Any:
    from sglang.srt.configs.glm5_next import Glm5NextConfig

    built = Glm5NextConfig(**config)
    built.text_config.architectures = list(config["architectures"])
    return built


def _load(config: Any, tensors: Iterable[tuple[str, torch.Tensor]]) -> Any:
    from sglang.srt.layers.quantization.base_config import QuantizeMethodBase
    from sglang.srt.models.glm5_next import Glm5NextForConditionalGeneration

    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = Glm5NextForConditionalGeneration(config).eval()
    finally:
        torch.set_default_dtype(default)
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data.fill_(float("nan"))
    model.load_weights(iter(tensors))
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, QuantizeMethodBase):
            method.process_weights_after_loading(module)
    unset = [
        name
        for name, parameter in model.named_parameters()
        if parameter.is_floating_point() and not name.startswith("visual.") and not torch.isfinite(parameter).all()
    ]
    if unset:
        raise ValueError(
            f"the checkpoint leaves {len(unset)} parameters of SGLang's model unset, {unset[0]} among them"
        )
    return model


def _watch_layer(layer: Any, seen: dict[str, torch.Tensor]) -> None:
    from sglang.srt.layers.layer_boundary.residual import access

    def keep(name: str, value: torch.Tensor) -> None:
        seen[name] = value.clone()

    layer.register_forward_pre_hook(lambda _module, args: keep("streams_in", access.buffer(args[1])))
    layer.register_forward_hook(lambda _module, _args, out: keep("streams_out", access.buffer(out[0])))
    layer.self_attn.register_forward_pre_hook(
        lambda _module, _args, kwargs: keep("attn_in", kwargs["hidden_states"]), with_kwargs=True
    )
    layer.self_attn.register_forward_hook(
        lambda _module, _args, out: keep("attn_out", out[0] if isinstance(out, tuple) else out)
    )
    layer.mlp.register_forward_pre_hook(lambda _module, args: keep("ffn_in", args[0]))
    layer.mlp.register_forward_hook(lambda _module, _args, out: keep("ffn_out", out))
    indexer = getattr(layer.self_attn, "indexer", None)
    if indexer is not None:
        indexer.register_forward_hook(lambda _module, _args, out: keep("selection", out))
