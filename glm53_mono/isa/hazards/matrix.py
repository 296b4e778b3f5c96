"""Matrix products: the hardware lets an instruction read the result of an MFMA before it is there.

The compiler keeps the distance, but not for inline assembly. Wait states as in LLVM's GCNHazardRecognizer
(`GFX940_XDL_N_PassWriteVgprVALUMemExpReadWaitStates`): the passes and 3 more, on gfx950 one more again beyond 2 passes.
"""

from __future__ import annotations

import re
from collections import deque

from glm53_mono.isa.listing import Instruction, Listing

_SHAPE = re.compile(r"v_mfma_(?:scale_)?f32_(\d+)x(\d+)x(\d+)_?(?:\d+b_)?(\w+)")

OPERATIONS_A_PASS = {"bf16": 4096, "f16": 4096, "f8f6f4": 8192, "fp8_fp8": 4096, "fp8_bf8": 4096, "bf8_bf8": 4096}
"""Multiply-adds of a SIMD in the four cycles of a pass, times 2: gfx950's peak by the type of the operands. A scaled
product counts as FP8 x FP8: FP4 would be there in half the passes, and the longer wait is never wrong."""


def matrix_hazards(listing: Listing) -> list[str]:
    """Results of a matrix product that are read too early."""
    found: list[str] = []
    for index, block in enumerate(listing.blocks):
        for place, product in enumerate(block.instructions):
            if product.mnemonic.startswith("v_mfma"):
                found += _early_reads(listing, index, place, product, wait_states(product.mnemonic))
    return list(dict.fromkeys(found))


def wait_states(mnemonic: str) -> int:
    """Wait states between a product and whatever reads its result, another product not counted.

    Raises:
        ValueError: a product whose passes are not known.
    """
    shape = _SHAPE.fullmatch(mnemonic)
    kind = shape[4] if shape else ""
    if kind not in OPERATIONS_A_PASS:
        raise ValueError(f"{mnemonic} is a matrix product of unknown length")
    m, n, k = (int(size) for size in shape.groups()[:3])
    passes = max(2, 2 * m * n * k // OPERATIONS_A_PASS[kind])
    return passes + 3 + (passes > 2)


def _early_reads(listing: Listing, block: int, place: int, product: Instruction, needed: int) -> list[str]:
    found: list[str] = []
    fewest: dict[int, int] = {}
    waiting = deque([(block, place + 1, 0)])
    while waiting:
        index, first, waited = waiting.popleft()
        overwritten = False
        for later in listing.blocks[index].instructions[first:]:
            if waited >= needed:
                break
            if later.mnemonic.startswith("v_mfma"):
                # a product after a product waits in hardware, or by rules of its own
                overwritten = bool(later.writes & product.writes)
            elif later.reads & product.writes:
                found.append(
                    f"matrix result read too early: {later} comes {waited} wait states after {product}, "
                    f"which needs {needed}"
                )
                overwritten = True
            if overwritten:
                break
            waited += _states(later)
        if overwritten or waited >= needed:
            continue
        for successor in listing.blocks[index].successors:
            if waited < fewest.get(successor, needed):
                fewest[successor] = waited
                waiting.append((successor, 0, waited))
    return found


def _states(instruction: Instruction) -> int:
    return int(instruction.operands[0], 0) + 1 if instruction.mnemonic == "s_nop" else 1
