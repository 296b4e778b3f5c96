"""Another step of the same size, as the next replay of a captured graph sees it."""

from __future__ import annotations

from dataclasses import replace

import torch

from glm53_mono.reference.state import PADDED_SLOT, StepInputs
from tests.kernels.rig import Model


def changed(inputs: StepInputs, longest: list[int], model: Model, generator: torch.Generator) -> StepInputs:
    """Another step of the same size: new tokens and lengths, and now and then a padded request."""
    lengths = torch.tensor([int(torch.randint(1, most + 1, (), generator=generator)) for most in longest])
    padded = torch.rand(len(longest), generator=generator) < 0.2
    padded[0] = False
    lengths = lengths.masked_fill(padded, 1).to(inputs.seq_lens)
    locations = inputs.req_to_token[inputs.req_pool_indices, lengths - 1].long()
    slots = 1 + torch.randperm(len(longest), generator=generator)
    return replace(
        inputs,
        input_ids=torch.randint(0, model.geometry.vocab, (len(longest),), generator=generator).to(inputs.input_ids),
        positions=lengths - 1,
        seq_lens=lengths,
        out_cache_loc=locations.masked_fill(padded.to(locations.device), 0),
        mamba_slots=slots.masked_fill(padded, PADDED_SLOT).to(inputs.mamba_slots),
    )
