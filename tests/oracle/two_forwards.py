"""A step by SGLang's own forward and by the built runtime in Triton's interpreter, from the same caches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from glm53_mono import runtime
from glm53_mono.geometry import Geometry
from glm53_mono.numerics import BOUNDS, Distance, distance
from glm53_mono.reference.state import Caches
from glm53_mono.upstream.monokernel import BuildContext, Plan, ShapeKey
from glm53_mono.upstream.running import ServedStep
from tests.oracle.sglang_cpu import batches
from tests.oracle.sglang_cpu.batches import Batch, Request
from tests.oracle.sglang_cpu.forward import SglangModel

THROUGH_LAYERS = Distance(rel=2e-2, max_abs=1.0)
"""Caches of a layer take in the rounding differences of the layers before it; single values of a state are far out."""

DECODE = ServedStep("decode", 1)

Spoil = Callable[[Any, Any], None]
"""What alters a ForwardBatch and the metadata of the linear backend before our forward sees them."""


@contextmanager
def built(served: SglangModel, step: ServedStep = DECODE) -> Iterator[runtime.Runtime]:
    """The runtime over SGLang's model, its workspace full of NaN.

    Args:
        step: what the server's steps are.
    """
    context = BuildContext(isa="interp", widths=tuple(range(1, 9)), deadline_s=5.0, copies={})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime, "served_step", lambda: step)
        made = runtime.build(served.model, served.runner.model_config.hf_config, context)
    made._launch.poison()
    yield made
    made.close()


def new_tokens(geometry: Geometry, seed: int, requests: Sequence[Request], count: int = 1) -> list[list[int]]:
    """`count` random tokens for each request."""
    return torch.randint(geometry.vocab, (len(requests), count), generator=torch.Generator().manual_seed(seed)).tolist()


def restore(served: SglangModel, caches: Caches) -> None:
    """Puts SGLang's caches back to what they were."""
    for (_, own), (_, wanted) in zip(served.caches.tensors(), caches.tensors(), strict=True):
        own.copy_(wanted)


def ours(
    served: SglangModel,
    made: runtime.Runtime,
    batch: Batch,
    change: Spoil | None = None,
    input_embeds: torch.Tensor | None = None,
    hidden_mode: str = "FULL",
) -> Any:
    """What our forward returns for a batch, after `change` has altered the ForwardBatch or, later, its metadata.

    Args:
        hidden_mode: SGLang's name of the hidden states that the step must hand out.
    """
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
    from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

    batches.enter_tables(served.runner, batch)
    forward = batches.forward_batch(served.runner, batch)
    forward.capture_hidden_mode = CaptureHiddenMode[hidden_mode]
    with forward_context(ForwardContext(attn_backend=served.backend)):
        served.backend.init_forward_metadata(forward)
        if change is not None:
            change(forward, served.backend.linear_attn_backend.forward_metadata)
        mode = "target_verify" if batch.mode == "verify" else batch.mode
        rows = len(forward.input_ids)
        key = ShapeKey(mode, forward.batch_size, rows // forward.batch_size)
        return made.forward(Plan(key=key), forward.input_ids, forward.positions, forward, input_embeds=input_embeds)


def both(
    served: SglangModel, made: runtime.Runtime, batch: Batch, change: Spoil | None = None
) -> tuple[Any, Any, Caches, Caches]:
    """SGLang's trace and our result of one step, and the caches that each leaves."""
    before = served.caches.clone()
    trace = served.forward(batch)
    after = served.caches.clone()
    restore(served, before)
    result = ours(served, made, batch, change)
    return trace, result, after, served.caches.clone()


def differences(geometry: Geometry, trace: Any, result: Any, after: Caches, found: Caches) -> list[str]:
    """Everything that is further apart than it may be."""
    hidden = near_ties_aside(result.hidden_states, trace.hidden)
    pairs = [
        ("hidden", result.hidden_states[hidden], trace.hidden[hidden], BOUNDS["step", "hidden"]),
        ("logits", result.next_token_logits[hidden], trace.logits[hidden], BOUNDS["step", "logits"]),
    ]
    return [*too_far(pairs), *cache_differences(geometry, after, found)]


def cache_differences(geometry: Geometry, after: Caches, found: Caches) -> list[str]:
    """Caches that are further apart than they may be."""
    pairs = []
    for (name, actual), (_, expected) in zip(found.tensors(), after.tensors(), strict=True):
        if name in ("conv", "temporal", "intermediate_conv", "intermediate_ssm"):
            # slot 0 is padding, which either side may write
            pairs += [(f"{name}[{i}]", actual[i, 1:], expected[i, 1:], THROUGH_LAYERS) for i in range(len(actual))]
        elif not name.startswith("index"):
            pairs.append((name, actual, expected, THROUGH_LAYERS))
        else:
            pairs.append((name, *(pooled_keys(geometry, pages) for pages in (actual, expected)), THROUGH_LAYERS))
    return too_far(pairs)


def too_far(pairs: Sequence[tuple[str, torch.Tensor, torch.Tensor, Distance]]) -> list[str]:
    """The pairs beyond their bounds, each with its distance."""
    return [
        f"{name}: {measured}"
        for name, actual, expected, bound in pairs
        if not (measured := distance(actual, expected)).within(bound)
    ]


def near_ties_aside(found: torch.Tensor, expected: torch.Tensor) -> list[int]:
    """The rows to compare: all but the farthest quarter, which a near-tie of a router may send to another expert."""
    apart = (found.float() - expected.float()).norm(dim=1) / expected.float().norm(dim=1)
    return apart.argsort()[: len(apart) - len(apart) // 4].tolist()


def pooled_keys(geometry: Geometry, pages: torch.Tensor) -> torch.Tensor:
    """The keys of index pages times their scales, [pages, pools, 128]."""
    keys = geometry.page_pools * geometry.index_head_dim
    values = pages[:, :keys].view(torch.float8_e4m3fn).view(len(pages), geometry.page_pools, -1).float()
    return values * pages[:, keys:].contiguous().view(torch.float32)[..., None]
