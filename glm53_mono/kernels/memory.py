"""Addresses: regions of the workspace and what the phase records point to."""

import triton
import triton.language as tl


@triton.jit
def region(workspace, OFFSET: tl.constexpr, DTYPE: tl.constexpr):
    """The region of DTYPE that starts OFFSET bytes into the workspace (uint8 pointer)."""
    return tl.multiple_of((workspace + OFFSET).to(tl.pointer_type(DTYPE), bitcast=True), 16)


@triton.jit
def private(workspace, OFFSET: tl.constexpr, BYTES: tl.constexpr, DTYPE: tl.constexpr):
    """This program's own BYTES of a private region."""
    own = workspace + OFFSET + tl.program_id(0).to(tl.int64) * BYTES
    return tl.multiple_of(own.to(tl.pointer_type(DTYPE), bitcast=True), 16)


@triton.jit
def address_of(address, DTYPE: tl.constexpr):
    """An int64 address as a pointer; the alignment hint makes its loads 16 bytes wide."""
    return tl.multiple_of(address.to(tl.pointer_type(DTYPE)), 16)


@triton.jit
def pointer(record, WORD: tl.constexpr, DTYPE: tl.constexpr):
    """The tensor that a word of the record points to."""
    return address_of(tl.load(record + WORD), DTYPE)
