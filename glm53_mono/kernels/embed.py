"""Phase 0: the embedding row into the four streams, and the first layer's mix shares; or the rows of one rank alone."""

import triton
import triton.language as tl

from glm53_mono.kernels.gemv import row_index
from glm53_mono.kernels.memory import pointer, region
from glm53_mono.kernels.mhc import GROUP, leave_mix_share, next_fn
from glm53_mono.kernels.peers import leave_partial
from glm53_mono.kernels.record import Word, device

EMBEDDING = device(Word.EMBEDDING)
FIRST_TOKEN = device(Word.FIRST_TOKEN)
TOKENS = device(Word.TOKENS)


@triton.jit
def embed(workspace, record, input_ids, rows, W: tl.constexpr, G: tl.constexpr, T: tl.constexpr):
    """Task: one tile of columns. Token ids are clamped: padded rows of a captured graph hold stale ones."""
    COLUMNS: tl.constexpr = T.output_columns
    streams = region(workspace, W.streams, tl.bfloat16)
    mix = region(workspace, W.mix, tl.float32)
    table = pointer(record, EMBEDDING, tl.bfloat16)
    stream = tl.arange(0, GROUP)[:, None]
    for tile in range(tl.program_id(0), (G.hidden + COLUMNS - 1) // COLUMNS, tl.num_programs(0)):
        column = tile * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        inside = column < G.hidden
        fn = next_fn(record, tile * COLUMNS, COLUMNS, G)
        for row in range(rows):
            token = tl.load(input_ids + row).to(tl.int64)
            token = tl.minimum(tl.maximum(token, 0), G.vocab - 1)
            x = tl.load(table + token * G.hidden + column + stream * 0, mask=inside & (stream >= 0), other=0.0)
            tl.store(streams + row * G.stream_width + stream * G.hidden + column, x, mask=inside & (stream >= 0))
            leave_mix_share(mix, tile, row, x.to(tl.float32), fn)


@triton.jit
def embed_own_rows(record, input_ids, rows, W: tl.constexpr, G: tl.constexpr, T: tl.constexpr):
    """The rows of the tokens that this rank owns, zeros for the others' tokens. Task: one tile of columns."""
    COLUMNS: tl.constexpr = T.output_columns
    table = pointer(record, EMBEDDING, tl.bfloat16)
    row = row_index()
    token = tl.load(input_ids + row, mask=row < rows, other=0).to(tl.int64)
    token = tl.minimum(tl.maximum(token, 0), G.vocab - 1) - tl.load(record + FIRST_TOKEN)
    owned = ((token >= 0) & (token < tl.load(record + TOKENS)))[:, None]
    for tile in range(tl.program_id(0), W.mix_tiles, tl.num_programs(0)):
        column = tile * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        x = tl.load(table + token[:, None] * G.hidden + column, mask=owned & (column < G.hidden), other=0.0)
        leave_partial(record, tile, rows, x, COLUMNS, W, G)
