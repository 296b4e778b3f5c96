"""The synthetic checkpoint of the MTP server tests: successors are likely, and the draft needs its hidden state."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from glm53_mono.checkpoint.config import model_config
from glm53_mono.cli.checkpoint import write_checkpoint
from test.e2e import likely_drafts


def test_successors_are_likely(tmp_path: Path, seed: int) -> None:
    folder = tmp_path / "model"
    write_checkpoint(folder, model_config(2, 2, "small"), seed)
    before = tensors(folder)
    likely_drafts.make_likely(folder, seed)
    after = tensors(folder)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert {name.rpartition(".")[0].rpartition(".")[2] for name in changed} == {"embed_tokens", "lm_head", "eh_proj"}
    embedding, head, projection = (
        next(tensor.float() for name, tensor in after.items() if name.endswith(f"{part}.weight"))
        for part in ("embed_tokens", "lm_head", "eh_proj")
    )
    likely = [token for token in range(1, len(head)) if (head[token] @ embedding[token - 1]) > head[token].norm() * 30]
    share = len(likely) / len(head)
    assert abs(share - likely_drafts.LIKELY) < 0.1
    for token in likely:
        assert int((head @ embedding[token - 1]).argmax()) == token
        hidden = torch.cat((torch.randn(head.shape[1]), embedding[token - 1]))
        assert torch.allclose(projection @ hidden, likely_drafts.LOUDNESS * embedding[token])


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}
