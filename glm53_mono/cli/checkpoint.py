"""`glm53-mono checkpoint`: writes a checkpoint of random weights that SGLang's own loader takes."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from enum import StrEnum
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

from glm53_mono.checkpoint.config import ConfigError, model_config
from glm53_mono.checkpoint.formats import WeightFormat
from glm53_mono.checkpoint.tensors import TensorSpec, tensor_table
from glm53_mono.checkpoint.tokenizer import write_tokenizer
from glm53_mono.geometry import GeometryError

if TYPE_CHECKING:
    import torch

SHARD_BYTES = 4 << 30
"""Size at which a file of weights is closed; one file is held in memory at a time."""

DRAW_ELEMENTS = 1 << 24
"""Elements drawn at once in fp32 before they are rounded; the values depend on it."""


class ScaleName(StrEnum):
    """Sizes of a layer: see `checkpoint.config.SCALES`."""

    SMALL = "small"
    FULL = "full"


class CheckpointError(ValueError):
    """A checkpoint that cannot be written; the message is one line for the user."""


def checkpoint_tensors(config: dict[str, Any], seed: int, device: str = "cpu") -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a synthetic checkpoint, one at a time, in the order of `tensor_table`.

    Args:
        config: the contents of config.json, from `model_config`.
        seed: the values of a tensor depend on it and on the tensor's name alone.
        device: where they are drawn and stay; a GPU draws other values than a CPU from the same seed.

    Raises:
        glm53_mono.geometry.GeometryError: a config that the model cannot have.
    """
    for spec in tensor_table(config):
        yield spec.name, draw_tensor(spec, seed, device)


class DrawnTensors(Mapping[str, "torch.Tensor"]):
    """A checkpoint's tensors, each drawn when it is asked for: a full-width model would not fit twice.

    Args:
        table: of the tensors.
        seed: of the whole checkpoint.
        device: that draws and holds them.
    """

    def __init__(self, table: list[TensorSpec], seed: int, device: str) -> None:
        self._specs = {spec.name: spec for spec in table}
        self._seed = seed
        self._device = device

    def __getitem__(self, name: str) -> torch.Tensor:
        return draw_tensor(self._specs[name], self._seed, self._device)

    def __iter__(self) -> Iterator[str]:
        return iter(self._specs)

    def __len__(self) -> int:
        return len(self._specs)


def draw_tensor(spec: TensorSpec, seed: int, device: str = "cpu") -> torch.Tensor:
    """One tensor of normally distributed values, quantised where the spec says so, in its shape and dtype."""
    import torch

    if spec.quantised is not None:
        from glm53_mono.weights import fp8, mxfp4

        quantise = fp8.quantised if spec.quantised.weight_format == WeightFormat.FP8 else mxfp4.quantised
        values, scales = quantise(draw_tensor(spec.quantised.source, seed, device))
        return scales if spec.quantised.is_scales else values
    digest = hashlib.sha256(f"{seed}:{spec.name}".encode()).digest()
    generator = torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "little", signed=True))
    tensor = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device=device)
    for part in tensor.view(-1).split(DRAW_ELEMENTS):
        # SGLang's loaders change the default dtype
        drawn = torch.randn(part.numel(), generator=generator, dtype=torch.float32, device=device)
        part.copy_(drawn.mul_(spec.std).add_(spec.mean))
    return tensor


def write_checkpoint(
    directory: Path,
    config: dict[str, Any],
    seed: int,
    *,
    device: str = "cpu",
    weights: bool = True,
    shard_bytes: int = SHARD_BYTES,
    on_written: Callable[[int], None] = lambda written: None,
) -> None:
    """Write config, tokenizer and weights to `directory`, all of it or nothing.

    Everything goes to a sibling directory first, which takes the name of `directory` when it is complete.

    Args:
        directory: a path that does not exist yet, or an empty directory; its parent must exist.
        config: the contents of config.json, from `model_config`.
        seed: as for `checkpoint_tensors`.
        device: where the weights are drawn.
        weights: whether to write them; without, the folder serves `--load-format dummy`.
        shard_bytes: at most so many bytes of weights a file, unless one tensor alone is larger.
        on_written: called with the bytes of each file of weights once it is written.

    Raises:
        CheckpointError: a path that cannot be written, or too little room on its disk.
        glm53_mono.geometry.GeometryError: a config that the model cannot have.
    """
    table = tensor_table(config) if weights else []
    check_target(directory, sum(spec.bytes for spec in table))
    directory = directory.resolve()
    unfinished = directory.parent / f".{directory.name}.{os.getpid()}.unfinished"
    with _system_errors_named(directory):
        unfinished.mkdir()
        try:
            _write_config(unfinished, config)
            if weights:
                _write_weights(unfinished, table, seed, device, shard_bytes, on_written)
            unfinished.rename(directory)
        except BaseException:
            shutil.rmtree(unfinished)
            raise


def check_target(directory: Path, weight_bytes: int) -> None:
    """Refuse a path that `write_checkpoint` could not write.

    Args:
        directory: the checkpoint's path.
        weight_bytes: the size of its weights.

    Raises:
        CheckpointError: no parent directory, something in the way, or too little room on the disk.
    """
    directory = directory.resolve()
    with _system_errors_named(directory):
        if not directory.parent.is_dir():
            raise CheckpointError(f"cannot write {directory}: {directory.parent} is not a directory")
        if directory.exists() and not (directory.is_dir() and not any(directory.iterdir())):
            raise CheckpointError(f"cannot write {directory}: it exists and is not an empty directory")
        if directory.is_mount():
            # The finished checkpoint is renamed into place, which does not work between file systems.
            raise CheckpointError(f"cannot write {directory}: it is a mount point; name a directory inside it")
        free = shutil.disk_usage(directory.parent).free
    if free < weight_bytes:
        need, room = f"{weight_bytes / 2**30:.1f} GiB", f"{free / 2**30:.1f} GiB"
        raise CheckpointError(f"cannot write {directory}: it takes {need}, its disk has {room} free")


def checkpoint(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where to write; must not exist, or be empty.")],
    layers: Annotated[int, typer.Option(help="Decoder layers, the MTP layer not counted.")] = 45,
    experts: Annotated[int, typer.Option(help="Routed experts of a layer.")] = 16,
    scale: Annotated[ScaleName, typer.Option(help="Real sizes, or small ones for a CPU.")] = ScaleName.FULL,
    weight_format: Annotated[WeightFormat, typer.Option("--format", help="Format of the weights.")] = WeightFormat.BF16,
    mtp: Annotated[bool, typer.Option("--mtp", help="Add the MTP layer, which speculative decoding needs.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of the weights, from 0.")] = 0,
    device: Annotated[str, typer.Option(help="Where weights are drawn: cpu, or cuda (other values).")] = "cpu",
    config_only: Annotated[
        bool, typer.Option("--config-only", help="Write no weights, for SGLang's --load-format dummy.")
    ] = False,
) -> None:
    """Write a checkpoint of GLM-5.3-Flash with random weights, and a tokenizer, for tests and benchmarks."""
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    try:
        config = _requested_config(layers, experts, scale, mtp, weight_format, seed, device)
        total = 0 if config_only else sum(spec.bytes for spec in tensor_table(config))
        # Here too, so that a refusal comes before the bar.
        check_target(directory, total)
        with Progress(*columns, console=Console(stderr=True)) as progress:
            bar = progress.add_task("weights", total=total)
            advance = partial(progress.advance, bar)
            write_checkpoint(directory, config, seed, device=device, weights=not config_only, on_written=advance)
    except (CheckpointError, ConfigError, GeometryError) as error:
        typer.echo(f"glm53-mono checkpoint: {error}", err=True)
        raise typer.Exit(2) from error
    size = "no weights" if config_only else f"{total / 2**30:.2f} GiB of {weight_format} weights, seed {seed}"
    typer.echo(f"{directory}: {layers} layers, {experts} experts, {size}")


def _requested_config(
    layers: int, experts: int, scale: ScaleName, mtp: bool, weight_format: WeightFormat, seed: int, device: str
) -> dict[str, Any]:
    if seed < 0:
        raise CheckpointError(f"--seed {seed} is less than 0")
    if find_spec("torch") is None:
        raise CheckpointError("drawing weights needs torch, which is not installed")
    import torch

    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    if device not in devices:
        raise CheckpointError(f"--device {device} is not here: use {' or '.join(devices)}")
    return model_config(layers, experts, scale.value, mtp=mtp, weight_format=weight_format)


@contextmanager
def _system_errors_named(directory: Path) -> Iterator[None]:
    """Turn what the system says about a path into a sentence about the checkpoint."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"cannot write {directory}: {error.strerror or error}") from error


def _write_config(directory: Path, config: dict[str, Any]) -> None:
    text = config["text_config"]
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    write_tokenizer(directory, text["vocab_size"], text["max_position_embeddings"])


def _write_weights(
    directory: Path,
    table: list[TensorSpec],
    seed: int,
    device: str,
    shard_bytes: int,
    on_written: Callable[[int], None],
) -> None:
    from safetensors.torch import save_file

    shards = _shards(table, shard_bytes)
    weight_map: dict[str, str] = {}
    with ThreadPoolExecutor(os.cpu_count() if device == "cpu" else 1) as pool:
        for number, shard in enumerate(shards, start=1):
            name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            drawn = pool.map(lambda spec: draw_tensor(spec, seed, device).cpu(), shard)
            save_file(dict(zip([spec.name for spec in shard], drawn, strict=True)), directory / name, {"format": "pt"})
            # safetensors keeps its files to their owner; a server may well run as somebody else.
            shutil.copymode(directory / "config.json", directory / name)
            weight_map |= {spec.name: name for spec in shard}
            on_written(sum(spec.bytes for spec in shard))
    index = {"metadata": {"total_size": sum(spec.bytes for spec in table)}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _shards(table: list[TensorSpec], shard_bytes: int) -> list[list[TensorSpec]]:
    """Cut the table into runs of at most `shard_bytes`; a larger tensor is alone in its run."""
    shards: list[list[TensorSpec]] = []
    room = 0
    for spec in table:
        if spec.bytes > room or not shards:
            shards.append([])
            room = shard_bytes
        shards[-1].append(spec)
        room -= spec.bytes
    return shards
