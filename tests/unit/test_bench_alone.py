"""`glm53-mono bench --alone` without a GPU: the launch that it would time computes what the reference does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from glm53_mono.checkpoint.config import model_config, order_layers
from glm53_mono.checkpoint.formats import WeightFormat
from glm53_mono.cli.bench_alone import Alone
from glm53_mono.cli.main import app
from glm53_mono.cli.step_bytes import step_bytes
from glm53_mono.kernels.record import Kind
from glm53_mono.weights.published import CHECKPOINTS
from tests.kernels.quantised import TINY_BLOCKS
from tests.kernels.rig import ONE_KDA
from tests.unit.servers import write_config


def prepared(weight_format: WeightFormat, seed: int) -> Alone:
    config = model_config(ONE_KDA.layers, 3, TINY_BLOCKS, mtp=False, weight_format=weight_format)
    order_layers(config, ONE_KDA.kda_layers, ONE_KDA.dense_layers)
    return Alone.prepare(config, isa="interp", requests=2, max_tokens=300, seed=seed, device="cpu")


@pytest.mark.parametrize("weight_format", WeightFormat)
def test_the_launch_is_a_decode_step_of_drawn_weights(seed: int, weight_format: WeightFormat) -> None:
    built = prepared(weight_format, seed)
    launch = built.launch
    assert launch.formats == CHECKPOINTS[weight_format]
    ids = torch.tensor([3, 200])
    hidden = torch.full((2, built.geometry.hidden), float("nan"), dtype=torch.bfloat16)
    launch.run_by_phase(*built.step(ids, 257), hidden)
    assert hidden.isfinite().all() and not torch.equal(hidden[0], hidden[1])


def test_a_request_has_pages_of_its_own(seed: int) -> None:
    built = prepared(WeightFormat.BF16, seed)
    table = built.req_to_token
    assert table.shape == (3, 512) and table[0].count_nonzero() == 0
    assert table[1:].flatten().tolist() == list(range(built.geometry.page_tokens, built.geometry.page_tokens + 1024))


def test_its_bytes_are_those_of_the_format(seed: int) -> None:
    sizes = {}
    for weight_format in WeightFormat:
        built = prepared(weight_format, seed)
        counts = [2 for phase in built.launch.phases if phase.kind is Kind.EXPERTS]
        sizes[weight_format] = step_bytes(built.geometry, built.weights, [1], counts).experts
    values = 2 * 3 * TINY_BLOCKS.expert_width * TINY_BLOCKS.hidden
    assert sizes == {"bf16": 2 * values, "fp8": values * (1 + 4 / 128**2), "mxfp4": values * 17 // 32}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--alone", "/nowhere"], "cannot tell the shapes of the weights from /nowhere/config.json"),
        (["--alone", "/nowhere", "--", "--tp", "1"], "--alone /nowhere starts nothing of SGLang's"),
    ],
)
def test_bad_arguments_are_one_line(arguments: list[str], says: str) -> None:
    done = CliRunner().invoke(app, ["bench", *arguments])
    assert done.exit_code == 2 and done.stdout == ""
    assert done.stderr.startswith(f"glm53-mono bench: {says}") and done.stderr.count("\n") == 1


def test_without_a_gpu_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = CliRunner().invoke(app, ["bench", "--alone", str(write_config(tmp_path / "model"))])
    assert done.exit_code == 2 and "no GPU is visible: a launch can only be measured" in done.stderr
