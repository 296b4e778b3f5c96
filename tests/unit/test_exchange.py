"""The ranks' buffers made known to one another: all of them or none, whatever one rank meets; each rank is a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from glm53_mono import exchange
from glm53_mono.exchange import ExchangeError, SharedBuffers, exchange_buffers, give_up
from glm53_mono.program.symmetric import Peers

RANKS = 4
SIZE = 64
WAIT_S = 20.0


class Meeting:
    """A collective of threads: what each brings is handed to all."""

    def __init__(self, ranks: int) -> None:
        self._barrier = threading.Barrier(ranks, timeout=WAIT_S)
        self._brought: list[Any] = [None] * ranks
        self.collectives = [0] * ranks

    def gather(self, rank: int) -> Callable[[Any], list[Any]]:
        def gathered(value: Any) -> list[Any]:
            self.collectives[rank] += 1
            self._brought[rank] = value
            self._barrier.wait()
            found = list(self._brought)
            self._barrier.wait()
            return found

        return gathered


@pytest.fixture
def handles(monkeypatch: pytest.MonkeyPatch) -> dict[int, Tensor]:
    """Handles that open as views of the tensor they stand for, by its address; tensors here are not a GPU's."""
    opened: dict[int, Tensor] = {}

    def reduce_tensor(tensor: Tensor) -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
        opened[tensor.data_ptr()] = tensor
        return (lambda address, storage_device: opened[address].view(-1)), (tensor.data_ptr(), "of the sender")

    monkeypatch.setattr(exchange, "reduce_tensor", reduce_tensor)
    return opened


def on_all_ranks(build: Callable[[int, Callable[[Any], list[Any]]], Any]) -> tuple[list[Any], Meeting]:
    """What each rank's build returns, or raises."""
    meeting = Meeting(RANKS)

    def one(rank: int) -> Any:
        try:
            return build(rank, meeting.gather(rank))
        except Exception as error:
            return error

    with ThreadPoolExecutor(RANKS) as pool:
        return list(pool.map(one, range(RANKS))), meeting


def buffers(*sizes: int) -> list[Tensor]:
    return [torch.zeros(size, dtype=torch.uint8) for size in sizes]


def test_every_rank_knows_all_buffers_in_the_order_of_the_ranks(handles: dict[int, Tensor]) -> None:
    own = buffers(*[SIZE] * RANKS)
    found, meeting = on_all_ranks(lambda rank, gather: exchange_buffers(own[rank], rank, gather))
    assert all(isinstance(each, SharedBuffers) for each in found)
    for rank, each in enumerate(found):
        assert each.peers.rank == rank
        assert each.peers.table.tolist() == [buffer.data_ptr() for buffer in own]
        each.close()
        each.close()
    assert len({*meeting.collectives}) == 1


def test_one_rank_that_gives_up_ends_all_of_them(handles: dict[int, Tensor]) -> None:
    own = buffers(*[SIZE] * RANKS)

    def build(rank: int, gather: Callable[[Any], list[Any]]) -> Any:
        if rank == 2:
            give_up("its GPU is partitioned", gather)
            raise RuntimeError("its GPU is partitioned")
        return exchange_buffers(own[rank], rank, gather)

    found, meeting = on_all_ranks(build)
    for rank, each in enumerate(found):
        assert isinstance(each, RuntimeError if rank == 2 else ExchangeError)
        assert "its GPU is partitioned" in str(each)
        assert rank == 2 or "rank 2: its GPU" in str(each)
    assert meeting.collectives == [1] * RANKS


def test_a_buffer_that_cannot_be_mapped_ends_all_ranks(
    handles: dict[int, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = buffers(*[SIZE] * RANKS)
    right = exchange._mapped

    def mapped(handle: Any, mine: Tensor) -> Tensor:
        if mine is own[1]:
            raise RuntimeError("peer access is not supported between these two devices")
        return right(handle, mine)

    monkeypatch.setattr(exchange, "_mapped", mapped)
    found, _ = on_all_ranks(lambda rank, gather: exchange_buffers(own[rank], rank, gather))
    assert all(isinstance(each, ExchangeError) for each in found)
    assert {str(each).count("rank ") for each in found} == {1}
    assert "rank 1: it cannot map a peer's buffer: peer access is not supported" in str(found[0])


def test_buffers_of_other_sizes_are_refused(handles: dict[int, Tensor]) -> None:
    own = buffers(SIZE, SIZE, SIZE, 2 * SIZE)
    found, _ = on_all_ranks(lambda rank, gather: exchange_buffers(own[rank], rank, gather))
    assert all(isinstance(each, ExchangeError) for each in found)
    assert "rank 3: its buffer has 128 bytes, where the ranks' have [64, 64, 64, 128]" in str(found[0])


def test_a_handle_is_opened_on_the_device_that_will_read_it() -> None:
    """torch would open it on the sender's device; a handle of torch's own is called by these names."""
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    names = rebuild_cuda_tensor.__code__.co_varnames[: rebuild_cuda_tensor.__code__.co_argcount]
    assert "storage_device" in names
    asked: list[Any] = []

    def rebuild(storage_handle: bytes, storage_device: int) -> Tensor:
        asked.append(storage_device)
        return torch.zeros(1)

    own = torch.zeros(1, dtype=torch.uint8, device="meta")
    exchange._mapped((rebuild, (b"handle", 3)), own)
    assert asked == [own.device.index] != [3]


@pytest.mark.parametrize(
    ("rank", "addresses", "says"),
    [(2, [64, 128], "rank 2 is not among the 2 ranks"), (0, [64, 0], "rank 1 lies at 0x0"), (0, [72, 64], "0x48")],
)
def test_addresses_that_no_kernel_could_use_are_refused(rank: int, addresses: list[int], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Peers.of_addresses(rank, addresses, "cpu")
