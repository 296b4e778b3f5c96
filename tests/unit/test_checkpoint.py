"""A synthetic checkpoint has the published names and sizes, SGLang loads it, and writing is all or nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import namedtuple
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from glm53_mono.checkpoint.config import SCALES, ConfigError, checkpoint_geometry, model_config
from glm53_mono.checkpoint.tensors import TensorSpec, tensor_table
from glm53_mono.checkpoint.tokenizer import EOS_TOKENS, HIDDEN_TOKENS, SHOWN_TOKENS, build_tokenizer, special_token_id
from glm53_mono.cli import checkpoint as checkpoint_module
from glm53_mono.cli.checkpoint import CheckpointError, checkpoint_tensors, draw_tensor, write_checkpoint
from glm53_mono.cli.main import app
from glm53_mono.geometry import GeometryError

LAYERS = 5
"""Dense KDA, sparse DSA, sparse KDA: every kind of layer of the real model, and the MTP layer beside them."""

SHARED_WITH_TARGET = ["model.embed_tokens.weight", "lm_head.weight"]
"""What SGLang's draft worker takes from the target model after both are loaded."""

SHARD_BYTES = 1 << 21

TEXTS = [
    "The quick brown fox",
    "ünïcödé 汉字かな交じり \U0001f98a\U0001f469\u200d\U0001f467 \u202e العربية",
    "def f(x):\n\treturn  x**2\r\n",
    "\x00\x7f\ufeff",
    "",
]


@pytest.fixture(scope="module")
def config() -> dict:
    return model_config(LAYERS, 8, "small")


@pytest.fixture(scope="module")
def written(config: dict, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint") / "small"
    write_checkpoint(directory, config, seed=0, shard_bytes=SHARD_BYTES)
    return directory


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in directory.glob("*.safetensors") for name, tensor in load_file(path).items()}


def run(*arguments: object):
    return CliRunner().invoke(app, ["checkpoint", *map(str, arguments)])


def test_config_only_writes_the_same_without_weights(written: Path, tmp_path: Path) -> None:
    done = run(tmp_path / "bare", "--layers", LAYERS, "--experts", 8, "--scale", "small", "--mtp", "--config-only")
    assert done.exit_code == 0 and "8 experts, no weights" in done.output
    bare = {path.name: path.read_bytes() for path in (tmp_path / "bare").iterdir()}
    whole = {path.name: path.read_bytes() for path in written.iterdir() if "safetensors" not in path.name}
    assert bare == whole


# What SGLang makes of it


@pytest.mark.slow
def test_sglang_fills_target_and_draft(config: dict, written: Path, tmp_path: Path) -> None:
    dropped = [
        "model.language_model.layers.3.self_attn.kv_a_proj_with_mqa.weight",
        "model.language_model.layers.5.hnorm.weight",
    ]
    for path in written.iterdir():
        if path.suffix == ".safetensors":
            kept = {name: tensor for name, tensor in load_file(path).items() if name not in dropped}
            save_file(kept, tmp_path / path.name)
        else:
            (tmp_path / path.name).symlink_to(path)

    script = Path(__file__).with_name("load_with_sglang.py")
    command = [sys.executable, str(script), str(written), str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    finished = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert finished.returncode == 0, finished.stderr[-2000:]
    complete, incomplete = json.loads(finished.stdout.splitlines()[-1])

    assert complete["geometry"] == json.loads(json.dumps(asdict(checkpoint_geometry(config))))
    assert complete["target"] == []
    assert complete["draft"] == SHARED_WITH_TARGET
    assert incomplete["target"] == ["model.layers.3.self_attn.fused_qkv_a_proj_with_mqa.weight"]
    assert sorted(set(incomplete["draft"]) - set(SHARED_WITH_TARGET)) == ["model.hnorm.weight"]


def test_full_scale_is_the_published_model() -> None:
    from transformers.models.glm5_next.configuration_glm5_next import Glm5NextTextConfig

    ours = model_config()["text_config"]
    published = Glm5NextTextConfig().to_dict()
    common = ours.keys() & published.keys()
    # In these the published config.json differs from the class's defaults.
    assert {name for name in common if ours[name] != published[name]} == {"index_kpool", "eos_token_id"}
    assert len(common) > 30
    assert len(ours["linear_attn_config"]["kda_layers"]) == 34
    assert ours["linear_attn_config"]["full_attn_layers"] == list(range(3, 45, 4))


# The table


def test_sizes_are_the_published_ones() -> None:
    table = tensor_table(model_config())
    vision_bytes = 2 * 0.56e9
    assert sum(spec.bytes for spec in table) + vision_bytes == pytest.approx(642.6e9, rel=2e-4)
    attention = sum(spec.bytes for spec in table if ".layers.3.self_attn." in spec.name)
    assert attention == pytest.approx(249_828_864, rel=1e-4)
    assert len({spec.name for spec in table}) == len(table)


def test_sizes_notice_a_missing_expert() -> None:
    table = tensor_table(model_config(experts=287))
    assert sum(spec.bytes for spec in table) + 2 * 0.56e9 != pytest.approx(642.6e9, rel=2e-4)


def test_mtp_layer_is_optional_and_has_one_stream() -> None:
    with_mtp = {spec.name for spec in tensor_table(model_config(LAYERS, 8, "small"))}
    without = {spec.name for spec in tensor_table(model_config(LAYERS, 8, "small", mtp=False))}
    added = with_mtp - without
    assert without < with_mtp
    assert all(name.startswith(f"model.language_model.layers.{LAYERS}.") for name in added)
    assert not any("hc_" in name for name in added)


# The values


def test_values_depend_on_seed_and_name_alone(config: dict, written: Path, tmp_path: Path) -> None:
    in_memory = dict(checkpoint_tensors(config, seed=0))
    on_disk = weights(written)
    assert on_disk.keys() == in_memory.keys()
    assert all(torch.equal(tensor, on_disk[name]) for name, tensor in in_memory.items())

    # A shorter model's tensors of the same names and shapes are the same.
    shorter = dict(checkpoint_tensors(model_config(2, 8, "small", mtp=False), seed=0))
    assert all(torch.equal(tensor, in_memory[name]) for name, tensor in shorter.items())

    other = dict(checkpoint_tensors(config, seed=1))
    assert not any(torch.equal(tensor, other[name]) for name, tensor in in_memory.items())
    layers = [f"model.language_model.layers.{layer}.self_attn.q_proj.weight" for layer in (0, 1)]
    assert not torch.equal(in_memory[layers[0]], in_memory[layers[1]])


def test_long_tensors_do_not_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = TensorSpec("long", (4, 64), "float32", mean=0.0, std=1.0)
    monkeypatch.setattr(checkpoint_module, "DRAW_ELEMENTS", 64)
    rows = draw_tensor(spec, seed=0)
    assert len({tuple(row.tolist()) for row in rows}) == 4


def distribution_errors(spec: TensorSpec, tensor: torch.Tensor) -> list[str]:
    """What would not happen to a normal distribution of the spec's moments in a million tensors."""
    values = tensor.double()
    count = values.numel()
    errors = []
    if (tensor.shape, tensor.dtype) != (spec.shape, getattr(torch, spec.dtype)):
        errors.append(f"{spec.name} is {tensor.shape} {tensor.dtype}")
    if not values.isfinite().all():
        errors.append(f"{spec.name} is not finite")
    if abs(values.mean() - spec.mean) > 6 * spec.std / count**0.5:
        errors.append(f"{spec.name} has mean {values.mean():.3g}, not {spec.mean:.3g}")
    # bf16 keeps 8 bits: near a mean of 1 its steps of 1/128 widen a deviation of 0.1 by less than 1 %.
    if count >= 64 and abs(values.std() / spec.std - 1) > 5 / count**0.5 + 0.01:
        errors.append(f"{spec.name} has deviation {values.std():.3g}, not {spec.std:.3g}")
    return errors


def test_values_are_distributed_as_the_table_says(config: dict, seed: int) -> None:
    drawn = dict(checkpoint_tensors(config, seed))
    assert [error for spec in tensor_table(config) for error in distribution_errors(spec, drawn[spec.name])] == []


def test_a_wrong_scale_is_noticed(config: dict, seed: int) -> None:
    spec = next(spec for spec in tensor_table(config) if spec.name.endswith("layers.0.self_attn.o_proj.weight"))
    assert distribution_errors(replace(spec, std=spec.std * 1.1), draw_tensor(spec, seed))
    assert distribution_errors(replace(spec, mean=0.1), draw_tensor(spec, seed))
    assert distribution_errors(spec, draw_tensor(replace(spec, dtype="float32"), seed))


# The files


def test_files_keep_to_their_size_and_the_index_is_right(config: dict, written: Path) -> None:
    index = json.loads((written / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in written.glob("*.safetensors"))
    assert len(files) > 5
    assert files == [f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)]
    for name in files:
        held = load_file(written / name)
        assert {tensor for tensor, file in index["weight_map"].items() if file == name} == held.keys()
        assert len(held) == 1 or sum(tensor.nbytes for tensor in held.values()) <= SHARD_BYTES
    assert index["metadata"]["total_size"] == sum(spec.bytes for spec in tensor_table(config))
    assert json.loads((written / "config.json").read_text()) == config


def test_command_writes_what_it_says(tmp_path: Path) -> None:
    target = tmp_path / "out"
    target.mkdir()
    done = run(target, "--layers", 2, "--experts", 4, "--scale", "small", "--seed", 7)
    assert done.exit_code == 0, done.output
    assert done.stdout.rstrip().splitlines()[-1].startswith(f"{target}: 2 layers, 4 experts, ")
    expected = dict(checkpoint_tensors(model_config(2, 4, "small", mtp=False), seed=7))
    found = weights(target)
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, found[name]) for name, tensor in expected.items())
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("failure", [KeyboardInterrupt, OSError(28, "No space left on device"), RuntimeError])
def test_a_failure_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure) -> None:
    def fails_late(spec: TensorSpec, seed: int, device: str) -> torch.Tensor:
        if spec.name == "lm_head.weight":
            raise failure
        return draw_tensor(spec, seed, device)

    monkeypatch.setattr(checkpoint_module, "draw_tensor", fails_late)
    expected = CheckpointError if isinstance(failure, OSError) else failure
    with pytest.raises(expected):
        write_checkpoint(tmp_path / "out", model_config(1, 2, "small", mtp=False), 0, shard_bytes=1 << 20)
    assert list(tmp_path.iterdir()) == []


# Bad input: one line, exit status 2, nothing written


@pytest.fixture
def occupied(tmp_path: Path) -> Path:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "kept").write_text("kept")
    (tmp_path / "file").write_text("kept")
    return tmp_path


SMALL = ("--scale", "small")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("out", *SMALL, "--layers", 0), "layers 0 is not from 1 to 1024"),
        (("out", *SMALL, "--layers", -3), "layers -3 is not from 1 to 1024"),
        (("out", *SMALL, "--experts", 1), "num_experts_per_tok 2 is more than n_routed_experts 1"),
        (("out", *SMALL, "--experts", 0), "experts 0 is not from 1 to 4096"),
        (("out", *SMALL, "--layers", 10**6), "layers 1000000 is not from 1 to 1024"),
        (("out", *SMALL, "--experts", 10**9), "experts 1000000000 is not from 1 to 4096"),
        (("out", "--experts", 7, "--layers", 4), "num_experts_per_tok 8 is more than n_routed_experts 7"),
        (("out", *SMALL, "--layers", 1, "--mtp"), "layers 1 cannot have an MTP layer on top"),
        (("out", *SMALL, "--seed", -1), "--seed -1 is less than 0"),
        (("out", *SMALL, "--device", "tpu"), "--device tpu is not here: use cpu"),
        (("full", *SMALL), "full: it exists and is not an empty directory"),
        (("file", *SMALL), "file: it exists and is not an empty directory"),
        (("missing/out", *SMALL), "missing is not a directory"),
        (("file/out", *SMALL), "file is not a directory"),
    ],
)
def test_bad_input_is_one_line(occupied: Path, arguments: tuple, sentence: str) -> None:
    before = sorted(occupied.rglob("*"))
    done = run(occupied / arguments[0], *arguments[1:])
    assert done.exit_code == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("glm53-mono checkpoint: ")
    assert sentence in line
    assert sorted(occupied.rglob("*")) == before


@pytest.mark.parametrize("arguments", [("--layers", "many"), ("--scale", "medium"), ("--format", "int4"), ("--what",)])
def test_unknown_options_and_values_are_refused(tmp_path: Path, arguments: tuple) -> None:
    done = run(tmp_path / "out", *arguments)
    assert done.exit_code == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.endswith(" checkpoint --help`")
    assert arguments[0] in line
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_takes_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Tests may run as root, whom permissions do not stop.
    def refuse(self: Path, *args, **kwargs):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "mkdir", refuse)
    done = run(tmp_path / "out", *SMALL, "--layers", 1, "--experts", 2)
    assert done.exit_code == 2
    assert done.stderr.splitlines()[-1] == f"glm53-mono checkpoint: cannot write {tmp_path / 'out'}: Permission denied"
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_too_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage(1 << 40, 1 << 40, 3 << 30))
    done = run(tmp_path / "out")
    assert done.exit_code == 2
    (line,) = done.stderr.splitlines()
    assert line.endswith("it takes 48.0 GiB, its disk has 3.0 GiB free")
    assert list(tmp_path.iterdir()) == []


def test_a_mount_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "is_mount", lambda self: self == tmp_path)
    done = run(tmp_path, *SMALL)
    assert done.exit_code == 2
    assert "is a mount point; name a directory inside it" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_link_to_an_empty_directory_is_written_through(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    done = run(tmp_path / "link", *SMALL, "--layers", 1, "--experts", 2)
    assert done.exit_code == 0, done.output
    assert (tmp_path / "disk" / "config.json").is_file()


def test_a_scale_that_does_not_exist() -> None:
    with pytest.raises(ConfigError, match="scale 'medium' is not one of full, small"):
        model_config(scale="medium")
    with pytest.raises(GeometryError, match="hidden_size 100 is not a multiple of 128"):
        model_config(scale=replace(SCALES["small"], hidden=100))


# The tokenizer


@pytest.fixture(scope="module")
def tokenizer(written: Path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(written)


@pytest.mark.parametrize("text", TEXTS)
def test_tokenizer_round_trips(tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(0 <= i < SCALES["small"].vocab for i in ids)


def test_special_tokens_have_the_places_of_the_published_ones(tokenizer) -> None:
    vocab = SCALES["small"].vocab
    for token in HIDDEN_TOKENS + SHOWN_TOKENS:
        assert tokenizer.encode(token) == [special_token_id(token, vocab)]
    # Of the ids that SGLang's and transformers' configs name.
    published = {"<|endoftext|>": 154820, "<|begin_of_image|>": 154830, "<|end_of_video|>": 154833, "<|image|>": 154854}
    assert {token: special_token_id(token, SCALES["full"].vocab) for token in published} == published
    assert tokenizer.eos_token == EOS_TOKENS[0]
    assert (
        tokenizer.decode(tokenizer.encode("<think>a</think><|user|>"), skip_special_tokens=True) == "<think>a</think>"
    )


def test_every_id_of_the_model_decodes(tokenizer) -> None:
    for token_id in range(SCALES["small"].vocab):
        assert isinstance(tokenizer.decode([token_id]), str)
    full = build_tokenizer(SCALES["full"].vocab)
    assert full.get_vocab_size() == special_token_id(SHOWN_TOKENS[-1], SCALES["full"].vocab) + 1
    assert full.decode(full.encode(TEXTS[1]).ids) == TEXTS[1]


def test_chat_template(tokenizer) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi\n"},
        {"role": "assistant", "content": None},
        {"role": "tool", "content": "42"},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == ("[gMASK]<sop><|system|>\nBe brief.<|user|>\nHi\n<|assistant|>\n<|observation|>\n42<|assistant|>\n")
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert tokenizer.decode(ids) == text
    with_tools = tokenizer.apply_chat_template(messages[1:2], tools=[{"name": "add"}], tokenize=False)
    assert with_tools == '[gMASK]<sop><|system|>\n[{"name": "add"}]<|user|>\nHi\n'


@pytest.mark.parametrize(
    ("vocab", "sentence"), [(300, "vocab 300 is less than"), (2_000_000, "vocab 2000000 is more than")]
)
def test_a_vocabulary_that_cannot_be(vocab: int, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        build_tokenizer(vocab)
