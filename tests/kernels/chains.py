"""Chains of verify steps and commits, and the same tokens in decode steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from glm53_mono.reference.state import Caches, StepInputs
from glm53_mono.reference.step import commit
from tests.kernels import rig
from tests.kernels.compare import bits
from tests.kernels.rig import Model


def run_chain(
    model: Model, lengths: list[int], tokens: int, rounds: int, seed: int, *, max_tokens: int = 512,
    backend: str = "interp", device: str = "cpu", prepare: Callable[..., Any] = rig.prepare_launch,
    run: Callable[[Any, Caches, StepInputs], torch.Tensor] = rig.run_step,
) -> list[str]:  # fmt: skip
    """Rounds of a verify step, the same tokens in decode steps, and a commit of some of them.

    Returns the names of what differs. After a round both sides go on from what the verify side committed, so a
    rejected draft's latents, pooled keys and ring entries are there for the next round to overwrite. `prepare` makes
    what `run` runs a step with: a launch, or those of several ranks.
    """
    generator = torch.Generator().manual_seed(seed)
    inputs = rig.step_inputs(
        model.geometry, lengths, tokens=tokens, seed=seed, max_tokens=max_tokens, verify=True, compact=True,
        device=device,
    )  # fmt: skip
    pages = rig.pages_of(inputs, model.geometry)
    caches = rig.random_caches(
        model.geometry, requests=len(lengths), pages=pages, seed=seed, draft_tokens=tokens, device=device
    )
    for scratch in (caches.intermediate_ssm, caches.intermediate_conv):
        scratch.fill_(float("nan"))
    committed = torch.tensor(lengths)
    plain = caches.clone()
    verify = prepare(model, caches, inputs, backend=backend)
    decode = prepare(model, plain, decode_step(inputs, 0), backend=backend)
    differing: list[str] = []
    for _ in range(rounds):
        inputs = moved_on(inputs, committed, model, generator)
        hidden = run(verify, caches, inputs)
        for token in range(tokens):
            out = run(decode, plain, decode_step(inputs, token))
            differing += differences(caches, plain, inputs, token, hidden, out)
        for name in ("latent", "index", "ring_key", "ring_gate"):
            pairs = zip(getattr(caches, name), getattr(plain, name), strict=True)
            differing += [name for found, right in pairs if not torch.equal(bits(found), bits(right))]
        accepted = torch.randint(0, tokens, (len(lengths),), generator=generator)
        commit(caches, inputs, accepted.to(device))
        plain.conv.copy_(caches.conv)
        plain.temporal.copy_(caches.temporal)
        committed = committed + accepted + 1
    return differing


def moved_on(inputs: StepInputs, committed: torch.Tensor, model: Model, generator: torch.Generator) -> StepInputs:
    """The verify step after `committed` tokens, with new draft tokens."""
    tokens, device = inputs.tokens_per_request, inputs.input_ids.device
    positions = (committed[:, None] + torch.arange(tokens)).flatten().to(device)
    rows = inputs.req_pool_indices.repeat_interleave(tokens)
    ids = torch.randint(0, model.geometry.vocab, (inputs.rows,), generator=generator)
    return replace(
        inputs,
        input_ids=ids.to(device),
        positions=positions,
        seq_lens=committed.to(device),
        out_cache_loc=inputs.req_to_token[rows, positions].long(),
    )


def decode_step(inputs: StepInputs, token: int) -> StepInputs:
    """The decode step that brings every request's draft number `token`."""
    own = slice(token, None, inputs.tokens_per_request)
    return replace(
        inputs,
        mode="decode",
        tokens_per_request=1,
        input_ids=inputs.input_ids[own].contiguous(),
        positions=inputs.positions[own].contiguous(),
        seq_lens=inputs.seq_lens + token + 1,
        out_cache_loc=inputs.out_cache_loc[own].contiguous(),
    )


def differences(
    caches: Caches, plain: Caches, inputs: StepInputs, token: int, hidden: torch.Tensor, out: torch.Tensor
) -> list[str]:
    """What a draft token's row, and state and window behind it in the scratch, do not share with its decode step."""
    slots, rows = inputs.mamba_slots.long(), inputs.verify_rows.long()
    pairs = {
        "hidden": (hidden[token :: inputs.tokens_per_request], out),
        "state": (caches.intermediate_ssm[:, rows, token], plain.temporal[:, slots]),
        "window": (caches.intermediate_conv[:, rows, token], plain.conv[:, slots]),
    }
    return [name for name, (found, right) in pairs.items() if not torch.equal(bits(found), bits(right))]
