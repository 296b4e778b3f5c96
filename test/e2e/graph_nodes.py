"""What a captured graph holds, asked of the GPU's driver."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from glm53_mono.upstream.launch import replaced

KINDS = ("kernel", "memcpy", "memset", "host", "graph", "empty", "wait", "event")
"""Names of the first types of CUgraphNodeType, in its order, which is hipGraphNodeType's too."""

LIBRARY, PREFIX = ("libamdhip64.so", "hip") if torch.version.hip else ("libcuda.so.1", "cu")
"""The driver, and what its functions' names begin with."""


class KernelNode(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2."""

    _fields_ = (
        ("function", ctypes.c_void_p),
        ("launch", ctypes.c_uint * 7),
        ("parameters", ctypes.c_void_p),
        ("extra", ctypes.c_void_p),
        ("kernel", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
    )


class HipKernelNode(ctypes.Structure):
    """hipKernelNodeParams."""

    _fields_ = (
        ("block", ctypes.c_uint * 3),
        ("extra", ctypes.c_void_p),
        ("function", ctypes.c_void_p),
        ("grid", ctypes.c_uint * 3),
        ("parameters", ctypes.c_void_p),
        ("shared_bytes", ctypes.c_uint),
    )


@contextmanager
def kept_graphs() -> Iterator[None]:
    """Graphs made within the block keep their nodes, which torch drops otherwise once a graph can be replayed."""
    with replaced(torch.cuda, "CUDAGraph", functools.partial(torch.cuda.CUDAGraph, keep_graph=True)):
        yield


def nodes(graph: torch.cuda.CUDAGraph) -> list[str]:
    """A captured graph's nodes in the order of the capture: a kernel's name, or what else a node is.

    Args:
        graph: with `keep_graph`.

    Raises:
        OSError: the driver refuses a question.
    """
    driver = ctypes.CDLL(LIBRARY)
    handle, count = ctypes.c_void_p(graph.raw_cuda_graph()), ctypes.c_size_t(0)
    _ask(driver, f"{PREFIX}GraphGetNodes", handle, None, ctypes.byref(count))
    found = (ctypes.c_void_p * count.value)()
    _ask(driver, f"{PREFIX}GraphGetNodes", handle, found, ctypes.byref(count))
    return [_name(driver, ctypes.c_void_p(node)) for node in found]


def misplaced(found: Sequence[str], own: Sequence[str], kernel: str) -> list[str]:
    """What keeps a step's graph from being SGLang's own with one kernel in the place of the model's forward.

    Both begin with the nodes of SGLang's metadata and end with those of its LogitsProcessor, so all nodes before the
    kernel are the first of SGLang's own, and all behind it the last.

    Args:
        found: nodes of the graph with the kernel.
        own: nodes of SGLang's own graph for as many rows.
        kernel: its name.
    """
    places = [place for place, node in enumerate(found) if node == kernel]
    if len(places) != 1:
        return [f"{len(places)} nodes of {kernel}"]
    before, after = list(found[: places[0]]), list(found[places[0] + 1 :])
    wrong = []
    if kernel in own:
        wrong.append(f"{kernel} in SGLang's own graph")
    if before != list(own[: len(before)]):
        wrong.append(f"before it {before}, SGLang's own begin with {list(own[: len(before)])}")
    last = list(own[max(0, len(own) - len(after)) :])
    if after != last:
        wrong.append(f"behind it {after}, SGLang's own end with {last}")
    if not after:
        wrong.append("no LogitsProcessor behind it")
    if len(before) + len(after) >= len(own):
        wrong.append(f"no forward in the {len(own)} nodes of SGLang's own graph")
    return wrong


def _name(driver: ctypes.CDLL, node: ctypes.c_void_p) -> str:
    kind = ctypes.c_int(-1)
    _ask(driver, f"{PREFIX}GraphNodeGetType", node, ctypes.byref(kind))
    if kind.value != KINDS.index("kernel"):
        return KINDS[kind.value] if kind.value < len(KINDS) else f"type {kind.value}"
    return (_hip_name if torch.version.hip else _cuda_name)(driver, node).decode()


def _cuda_name(driver: ctypes.CDLL, node: ctypes.c_void_p) -> bytes:
    launch, name = KernelNode(), ctypes.c_char_p()
    _ask(driver, "cuGraphKernelNodeGetParams_v2", node, ctypes.byref(launch))
    # a kernel of a library that is no part of a context has no function
    if launch.function:
        _ask(driver, "cuFuncGetName", ctypes.byref(name), ctypes.c_void_p(launch.function))
    else:
        _ask(driver, "cuKernelGetName", ctypes.byref(name), ctypes.c_void_p(launch.kernel))
    return name.value or b""


def _hip_name(driver: ctypes.CDLL, node: ctypes.c_void_p) -> bytes:
    launch = HipKernelNode()
    _ask(driver, "hipGraphKernelNodeGetParams", node, ctypes.byref(launch))
    of_host_function, of_module_function = driver.hipKernelNameRefByPtr, driver.hipKernelNameRef
    of_host_function.restype = of_module_function.restype = ctypes.c_char_p
    function = ctypes.c_void_p(launch.function)
    # a kernel that the program was linked with is known by its host function, one of a module is the function itself
    return of_host_function(function, None) or of_module_function(function) or b""


def _ask(driver: ctypes.CDLL, question: str, *arguments: object) -> None:
    status = getattr(driver, question)(*arguments)
    if status != 0:
        raise OSError(f"{question} returns {status}, not 0")
