"""`doctor -- <launch_server arguments>`: what would become of a server, on this machine or on another."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from glm53_mono.cli import serving
from glm53_mono.cli.serving import ServingError, Verdict, judge
from glm53_mono.upstream import launch
from tests.unit.servers import MONOKERNEL, PLAIN, SEED, words


def judged(published: Path, arguments: Sequence[str], isa: str | None = "gfx950") -> Verdict:
    """Judge a server that serves the published model."""
    return judge(["--model-path", str(published), *arguments], isa)


@pytest.fixture(autouse=True)
def _no_gpu_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests hold wherever they run: this machine's own GPU, if any, is not looked at."""
    monkeypatch.setattr(launch, "device_isa", lambda: None)


@pytest.mark.usefixtures("everything_built")
@pytest.mark.parametrize("isa", ["gfx950", "sm_90"])
@pytest.mark.parametrize("flag", [MONOKERNEL, words("--monokernel-backend amd")])
def test_the_seed_server_runs_its_verify_steps(published: Path, isa: str, flag: tuple[str, ...]) -> None:
    verdict = judged(published, (*SEED, *flag), isa)
    assert verdict.runs
    assert verdict.spec == "glm53_mono"
    assert verdict.isa == isa
    assert verdict.steps == launch.Steps("target_verify", (1, 2), 4)
    assert verdict.steps.rows == (4, 8)


@pytest.mark.usefixtures("everything_built")
@pytest.mark.parametrize(
    ("arguments", "steps"),
    [
        ((*PLAIN,), launch.Steps("decode", (1, 2, 3, 4, 5, 6, 7, 8), 1)),
        ((*PLAIN, *words("--disable-cuda-graph")), launch.Steps("decode", (1, 2, 3, 4, 5, 6, 7, 8), 1)),
        ((*PLAIN, *words("--cuda-graph-bs-decode 4 8 16")), launch.Steps("decode", (4, 8), 1)),
        ((*PLAIN, *words("--cuda-graph-max-bs-decode 3")), launch.Steps("decode", (1, 2, 3), 1)),
        (
            (*SEED, *words("--speculative-num-steps 5 --speculative-num-draft-tokens 6")),
            launch.Steps("target_verify", (1,), 6),
        ),
    ],
)
def test_served_steps(published: Path, arguments: tuple[str, ...], steps: launch.Steps) -> None:
    verdict = judged(published, (*arguments, *MONOKERNEL))
    assert verdict.reasons == ()
    assert verdict.steps == steps


def test_a_server_of_several_ranks_runs(published: Path) -> None:
    """Nothing is refused as not yet built."""
    verdict = judged(published, (*SEED, *MONOKERNEL))
    assert "--tp" in SEED
    assert verdict.reasons == ()
    assert verdict.steps == launch.Steps("target_verify", (1, 2), 4)


def test_mtp_runs_on_one_rank(published: Path) -> None:
    """Nothing is refused as not yet built."""
    verdict = judged(published, (*SEED, *words("--tp 1"), *MONOKERNEL))
    assert verdict.reasons == ()
    assert verdict.steps == launch.Steps("target_verify", (1, 2), 4)


@pytest.mark.usefixtures("everything_built")
def test_every_reason_is_listed(published: Path) -> None:
    verdict = judged(published, (*SEED, *MONOKERNEL, *words("--ep-size 4 --kv-canary log --enable-pdmux")))
    assert [reason.split()[0] for reason in verdict.reasons] == ["expert", "--kv-canary", "--enable-pdmux"]


@pytest.mark.usefixtures("everything_built")
def test_a_server_that_does_not_ask_for_it_does_not_run_it(published: Path) -> None:
    (reason,) = judged(published, SEED).reasons
    assert "add --enable-amd-monokernel" in reason


@pytest.mark.usefixtures("everything_built")
def test_what_needs_the_real_machine_is_listed(published: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = (*SEED, *MONOKERNEL)
    everywhere = {serving.AFTER_LOADING}
    assert set(judged(published, arguments, "gfx950").not_evaluated) == everywhere | {
        *serving.WITHOUT_GPU,
        *serving.WITHOUT_ROCM,
    }
    assert set(judged(published, arguments, "sm_90").not_evaluated) == everywhere | {*serving.WITHOUT_GPU}


def test_weights_are_named_as_in_the_support_matrix() -> None:
    named = {name: serving.weight_format(name) for name in (None, "fp8", "quark", "awq")}
    assert named == {None: "bf16", "fp8": "FP8 blocks", "quark": "Quark MXFP4 with FP8 blocks", "awq": "awq"}


@pytest.mark.usefixtures("everything_built")
def test_on_rocm_only_rocm_s_defaults_count(published: Path) -> None:
    # SGLang's DSA default is triton on ROCm and fa3 on Hopper; only the second has a pooled selection.
    arguments = (*words("--tp 4 --kv-cache-dtype bfloat16 --dsa-prefill-backend tilelang"), *MONOKERNEL)
    (reason,) = judged(published, arguments, "gfx950").reasons
    assert "--dsa-decode-backend 'triton'" in reason
    assert judged(published, arguments, "sm_90").reasons == ()


@pytest.mark.usefixtures("everything_built")
def test_forbidding_the_shuffled_index_keys_is_seen(published: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_DSA_HIP_DISABLE_PRESHUFFLE", "1")
    arguments = (*PLAIN, *MONOKERNEL, "--disable-radix-cache")
    (reason,) = judged(published, arguments).reasons
    assert "page size is 1" in reason
    assert judged(published, arguments, "sm_90").reasons == ()


def test_a_verdict_becomes_json(published: Path) -> None:
    verdict = judged(published, (*SEED, *words("--kv-cache-dtype fp8_e4m3"), *MONOKERNEL))
    plain = json.loads(json.dumps(verdict.as_dict()))
    assert plain["runs"] is False
    assert plain["reasons"] == list(verdict.reasons)
    assert verdict.reasons
    assert plain["steps"] == {"mode": "target_verify", "batch_sizes": [1, 2], "tokens_per_request": 4}


@pytest.mark.parametrize(
    ("arguments", "isa", "expected"),
    [
        (SEED, "gfx942", "ISA 'gfx942' is not one of gfx950, sm_90"),
        (SEED, None, "this machine has no GPU: name the device with --isa (gfx950 or sm_90)"),
        ((*SEED, "--no-such-flag"), "gfx950", "unrecognized arguments: --no-such-flag"),
        ((*SEED, *words("--dsa-decode-backend nothing")), "gfx950", "invalid choice: 'nothing'"),
        ((*SEED, *words("--speculative-eagle-topk 2")), "gfx950", "SGLang refuses these arguments: ValueError"),
        ((*SEED, *words("--config missing.yaml")), "gfx950", "missing.yaml"),
    ],
)
def test_what_cannot_be_judged_is_one_line(
    published: Path, arguments: tuple[str, ...], isa: str | None, expected: str
) -> None:
    with pytest.raises(ServingError) as caught:
        judged(published, arguments, isa)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [None, "{", "{}"])
def test_a_model_without_a_config_cannot_be_judged(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ServingError, match="SGLang refuses these arguments") as caught:
        judged(tmp_path, SEED)
    assert "\n" not in str(caught.value)


def test_judging_leaves_the_process_as_it_was(published: Path) -> None:
    import torch

    root = logging.getLogger()
    before = (dict(os.environ), root.handlers[:], root.level, root.manager.disable, torch.cuda.get_device_capability)
    judged(published, (*SEED, *MONOKERNEL))
    after = (dict(os.environ), root.handlers[:], root.level, root.manager.disable, torch.cuda.get_device_capability)
    assert after == before
