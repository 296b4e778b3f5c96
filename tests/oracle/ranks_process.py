"""One rank of a server of several, on the CPU: SGLang's sharded model, its forward with real all-reduces, and ours.

`python -m tests.oracle.ranks_process RANK RANKS FOLDER SEED` prints what it found as JSON. The ranks' processes share
FOLDER: the rendezvous of SGLang's groups, and the symmetric buffers as mapped files.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.oracle.sglang_cpu import context

context.prepare_environment()

import numpy as np
import pytest
import torch
import triton.language as tl
from torch import Tensor

from glm53_mono import exchange
from glm53_mono.checkpoint.config import checkpoint_geometry
from glm53_mono.cli.checkpoint import checkpoint_tensors
from glm53_mono.geometry import MAX_ROWS, Geometry
from glm53_mono.kernels import monokernel, peers, reduce
from glm53_mono.numerics import BOUNDS
from glm53_mono.reference.weights import from_checkpoint
from glm53_mono.runtime import Runtime
from glm53_mono.upstream import model as upstream
from glm53_mono.weights.model import with_matrices
from tests.kernels.rig import Model
from tests.kernels.shards import shard_geometry, shard_model
from tests.oracle import two_forwards
from tests.oracle.sglang_cpu.batches import Batch, Request
from tests.oracle.sglang_cpu.forward import SglangModel, serving
from tests.oracle.sglang_cpu.models import ONE_OF_EACH, small_config
from tests.oracle.sglang_cpu.recording import grow_synthetic_context
from tests.sources import wrapped

CONFIG = small_config(ONE_OF_EACH)
DRAFT_TOKENS = 2
LONGEST_WAIT_S = 60.0


def named_tensors(record: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a record of weights, by its path; the head is no part of a step."""
    if isinstance(record, Tensor):
        yield name, record
    elif isinstance(record, tuple):
        for index, item in enumerate(record):
            yield from named_tensors(item, f"{name}.{index}")
    elif dataclasses.is_dataclass(record):
        for part in dataclasses.fields(record):
            if part.name != "head":
                yield from named_tensors(getattr(record, part.name), f"{name}.{part.name}")


def weights_that_differ(served: SglangModel, whole: Model, rank: int, geometry: Geometry) -> list[str]:
    """Where what we read of SGLang's sharded model is not the whole model's part that the tests cut out."""
    weights = upstream.step_weights(served.model, geometry, {})
    read = dict(named_tensors(with_matrices(weights, lambda _, matrix: matrix.data)))
    own = shard_model(whole, rank, geometry.tp_size).weights
    cut = dict(named_tensors(own))
    names = [name for name, tensor in cut.items() if name not in read or not torch.equal(read[name], tensor)]
    names += [] if weights.first_token == own.first_token else ["first_token"]
    return [*names, *(read.keys() - cut.keys())]


def file_handles(folder: Path, rank: int) -> Callable[[Tensor], Any]:
    """In the place of torch's handles of GPU memory: the buffer moves into a mapped file, whose path is the handle."""

    def reduce_tensor(own: Tensor) -> Any:
        path = str(folder / f"symmetric {rank}")
        own.set_(torch.from_file(path, shared=True, size=own.numel(), dtype=torch.uint8))
        own.zero_()
        return torch.from_file, (path, True, own.numel(), torch.uint8)

    return reduce_tensor


def mapped(handle: Any, own: Tensor) -> Tensor:
    open_file, (path, shared, size, dtype) = handle
    return open_file(path, shared=shared, size=size, dtype=dtype)


def until_raised(right: Callable[..., Any]) -> Callable[..., Any]:
    """The interpreter's wait, which looks once, as a wait for another process."""

    def wait_for_peers(record: Any, host_record: Any, phase: Any, deadline: Any, W: Any, G: Any, BACKEND: Any) -> None:
        end = time.monotonic() + LONGEST_WAIT_S
        while time.monotonic() < end and is_late(record, W, G):
            time.sleep(0.0005)
        right(record, host_record, phase, deadline, W, G, BACKEND)

    return wait_for_peers


def is_late(record: Any, W: Any, G: Any) -> bool:
    if int(tl.program_id(0)) >= W.mix_tiles:
        return False
    own = peers.own_buffer(record)
    flags = peers.words_at(own, W.symmetric.flags) + tl.program_id(0) * peers.LINE.value
    number = tl.load(peers.finished_reduces(record, W)) + 1
    late, _ = peers.poll(flags, tl.load(record + peers.RANK.value), number, G)
    return int(late) < G.tp_size


def own_share_alone(_right: Callable[..., Any]) -> Callable[..., Any]:
    """A sum that leaves the other ranks out."""

    def sum_of_ranks(record: Any, tile: Any, rows: Any, columns: int, W: Any, G: Any) -> Any:
        column = (tile * columns + tl.arange(0, columns))[None, :]
        finished = tl.load(peers.finished_reduces(record, W))
        share = peers.partial_rows(peers.own_buffer(record), finished, W, G)
        return tl.load(share + tl.arange(0, MAX_ROWS)[:, None] * G.hidden + column).to(tl.float32)

    return sum_of_ranks


def compared(served: SglangModel, made: Runtime, geometry: Geometry, seed: int) -> dict[str, Any]:
    """A decode step by SGLang's ranks and by ours: what is further apart than it may be, and so with a seeded bug."""
    generator = torch.Generator().manual_seed(seed)
    requests = [Request(2, 3, (4, 2)), Request(1, 1, (5,))]
    for request, length in zip(requests, (255, 67), strict=True):
        grow_synthetic_context(served, request, length, geometry, generator)
    batch = Batch.of("decode", requests, two_forwards.new_tokens(geometry, seed, requests))
    before = served.caches.clone()
    trace, result, after, found = two_forwards.both(served, made, batch)
    two_forwards.restore(served, before)
    with wrapped([(reduce, "sum_of_ranks", own_share_alone)]):
        spoiled = two_forwards.ours(served, made, batch)

    def apart(hidden: Tensor) -> list[str]:
        return two_forwards.too_far([("hidden", hidden, trace.hidden, BOUNDS["step", "hidden"])])

    return {
        "differences": [*apart(result.hidden_states), *two_forwards.cache_differences(geometry, after, found)],
        "differences with a bug": apart(spoiled.hidden_states),
        "bits": hashlib.sha256(result.hidden_states.view(torch.uint8).numpy().tobytes()).hexdigest(),
        "logits": list(result.next_token_logits.shape),
        "ranks": made.launch.geometry.tp_size,
    }


def main(rank: int, ranks: int, folder: Path, seed: int) -> None:
    """Everything that one rank has to say."""
    torch.set_num_threads(1)
    np.seterr(over="ignore", invalid="ignore")
    tensors = dict(checkpoint_tensors(CONFIG, seed))
    whole = checkpoint_geometry(CONFIG)
    geometry = shard_geometry(whole, ranks)
    place = context.Place(rank, ranks, (folder / "rendezvous").as_uri())
    with (
        serving(
            CONFIG, tensors.items(), requests=3, max_context=512, pages=6, draft_tokens=DRAFT_TOKENS, place=place
        ) as served,
        pytest.MonkeyPatch.context() as patch,
    ):
        model = Model(whole, from_checkpoint(tensors, whole))
        answer: dict[str, Any] = {
            "weights": weights_that_differ(served, model, rank, geometry),
            "weights of another rank": weights_that_differ(served, model, (rank + 1) % ranks, geometry),
        }
        patch.setattr(exchange, "reduce_tensor", file_handles(folder, rank))
        patch.setattr(exchange, "_mapped", mapped)
        patch.setattr(monokernel, "wait_for_peers", until_raised(peers.wait_for_peers))
        with two_forwards.built(served) as made:
            answer |= compared(served, made, geometry, seed)
    print(json.dumps(answer))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
