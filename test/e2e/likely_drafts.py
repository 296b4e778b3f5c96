"""A synthetic checkpoint whose drafts are often right, and only if the draft model gets the right hidden states.

Random weights draft no better than chance: every accept length is 1, whatever a verify step returns. Here token t is
most often followed by t + 1. Embeddings of successors are one another shifted by one channel, the head's row of a
likely token is its predecessor's embedding, and the draft model sees nothing but the hidden state it is handed, shifted
by one channel. The head's other rows stay random: where one of their tokens would be next, the target chooses by its
layers' outputs, and the drafts are wrong.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

LIKELY = 0.7
"""Share of the tokens that are likely after their predecessor."""

LOUDNESS = 3.0
"""Standard deviation of an embedding, where a layer's output has about 1."""


def make_likely(folder: Path, seed: int) -> None:
    """Change the embedding, the head and the draft's input projection of a checkpoint that has an MTP layer."""
    generator = torch.Generator().manual_seed(seed)
    embedding = _tensor(folder, "embed_tokens.weight")
    vocab, width = embedding.shape
    unit = successors(vocab, width, generator)
    _replace(folder, "embed_tokens.weight", (LOUDNESS * unit).to(embedding.dtype))
    head = _tensor(folder, "lm_head.weight")
    _replace(folder, "lm_head.weight", likely_head(head, unit, generator))
    _replace(folder, "eh_proj.weight", shifting_projection(width).to(embedding.dtype))


def successors(vocab: int, width: int, generator: torch.Generator) -> torch.Tensor:
    """Unit-variance embeddings fp32 [vocab, width], each its predecessor's shifted by a channel; every `width` anew."""
    starts = torch.randn(-(-vocab // width), width, generator=generator)
    shift = (torch.arange(width)[None, :] - torch.arange(width)[:, None]) % width
    return torch.cat([start[shift] for start in starts])[:vocab]


def likely_head(head: torch.Tensor, unit: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """The head [vocab, width] with the rows of likely tokens replaced; `unit` holds the embeddings."""
    vocab, width = unit.shape
    likely = torch.rand(vocab, generator=generator) < LIKELY
    # here no token's embedding is its predecessor's
    likely[::width] = False
    rows = likely.nonzero().flatten()
    changed = head.clone()
    changed[rows] = (unit[rows - 1] * width**-0.5).to(head.dtype)
    return changed


def shifting_projection(width: int) -> torch.Tensor:
    """`eh_proj`, fp32 [width, 2 * width]: nothing of the token's embedding, the hidden state shifted by a channel."""
    channel = torch.arange(width)
    weight = torch.zeros(width, 2 * width)
    weight[channel, width + (channel - 1) % width] = LOUDNESS
    return weight


def _file_of(folder: Path, ending: str) -> tuple[Path, str]:
    names: dict[str, str] = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    (name,) = (name for name in names if name.endswith(ending))
    return folder / names[name], name


def _tensor(folder: Path, ending: str) -> torch.Tensor:
    from safetensors import safe_open

    file, name = _file_of(folder, ending)
    with safe_open(file, "pt") as opened:
        return opened.get_tensor(name)


def _replace(folder: Path, ending: str, value: torch.Tensor) -> None:
    from safetensors.torch import load_file, save_file

    file, name = _file_of(folder, ending)
    tensors: dict[str, Any] = load_file(file)
    save_file(tensors | {name: value.contiguous()}, file, {"format": "pt"})
