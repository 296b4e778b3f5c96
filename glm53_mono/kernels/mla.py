"""MLA layers without rope: latents, absorbed query, sparse attention by key chunks, and the values (MODEL_MATH 3.1)."""

import triton
import triton.language as tl

from glm53_mono.kernels import gemv
from glm53_mono.kernels.gemv import folded_columns, row_index, unfold, zero_tile
from glm53_mono.kernels.indexer import close_pools, row_length, score_pages
from glm53_mono.kernels.memory import pointer, private, region
from glm53_mono.kernels.record import Word, device
from glm53_mono.kernels.stored import add_chunk, chunk_depth, matrix_in
from glm53_mono.kernels.sync import program_barrier

LATENTS = device(Word.LATENTS)
INDEX_KEY = device(Word.INDEX_KEY)
INDEX_GATE = device(Word.INDEX_GATE)
HEAD_WEIGHTS = device(Word.HEAD_WEIGHTS)
QUERY = device(Word.QUERY)
INDEX_QUERY = device(Word.INDEX_QUERY)
QUERY_NORM = device(Word.QUERY_NORM)
LATENT_NORM = device(Word.LATENT_NORM)
LATENT_POOL = device(Word.LATENT_POOL)
KEY_UP = device(Word.KEY_UP)
VALUE_UP = device(Word.VALUE_UP)


@triton.jit
def mla_project(
    workspace, record, rows,
    W: tl.constexpr, G: tl.constexpr, T: tl.constexpr, F: tl.constexpr, BACKEND: tl.constexpr,
):  # fmt: skip
    """q and kv latents, the indexer's key and gate, and its head weights.

    Tasks: one whole output tile; from the last program down, where no tile is left, an index head's weights.
    """
    COLUMNS: tl.constexpr = T.latent_columns
    LATENT_TILES: tl.constexpr = (G.q_rank + G.latent + COLUMNS - 1) // COLUMNS
    INDEX_TILES: tl.constexpr = (G.index_head_dim + COLUMNS - 1) // COLUMNS
    GATE: tl.constexpr = LATENT_TILES + INDEX_TILES
    TILES: tl.constexpr = GATE + INDEX_TILES
    pid = tl.program_id(0)
    programs = tl.num_programs(0)
    x = region(workspace, W.mixed, tl.bfloat16)
    row = row_index()[:, None]
    for head in range(programs - 1 - pid, G.index_heads, programs):
        project_head_weight(workspace, record, x, head, rows, W, G)
    PLAIN: tl.constexpr = F.plain
    LATENT_STORAGE: tl.constexpr = F.latents
    KEY_STORAGE: tl.constexpr = F.index_key
    if (LATENT_STORAGE == PLAIN) & (KEY_STORAGE == PLAIN):
        project_tiles(workspace, record, x, row, rows, 0, TILES, PLAIN, W, G, T, BACKEND)
    else:
        project_tiles(workspace, record, x, row, rows, 0, LATENT_TILES, LATENT_STORAGE, W, G, T, BACKEND)
        project_tiles(workspace, record, x, row, rows, LATENT_TILES, GATE, KEY_STORAGE, W, G, T, BACKEND)
        project_tiles(workspace, record, x, row, rows, GATE, TILES, PLAIN, W, G, T, BACKEND)


@triton.jit
def own_tile(FIRST: tl.constexpr, programs):
    """The first tile from FIRST on that is this program's when tiles are dealt out in turn from tile 0."""
    if FIRST == 0:
        return tl.program_id(0)
    else:
        return FIRST + (tl.program_id(0) + programs - FIRST % programs) % programs


@triton.jit
def project_tiles(
    workspace, record, x, row, rows, FIRST: tl.constexpr, END: tl.constexpr, STORAGE: tl.constexpr,
    W: tl.constexpr, G: tl.constexpr, T: tl.constexpr, BACKEND: tl.constexpr,
):  # fmt: skip
    """The tiles [FIRST, END) of `mla_project`: first those of the latents, then the index key's and its gate's."""
    COLUMNS: tl.constexpr = T.latent_columns
    DEPTH: tl.constexpr = chunk_depth(T.latent_depth, G.hidden, STORAGE)
    CHUNKS: tl.constexpr = G.hidden // DEPTH
    LATENT_WIDTH: tl.constexpr = G.q_rank + G.latent
    LATENT_TILES: tl.constexpr = (LATENT_WIDTH + COLUMNS - 1) // COLUMNS
    INDEX_TILES: tl.constexpr = (G.index_head_dim + COLUMNS - 1) // COLUMNS
    programs = tl.num_programs(0)
    start = own_tile(FIRST, programs)
    acc = zero_tile(COLUMNS)
    for i in tl.range(0, (END - start + programs - 1) // programs * CHUNKS, num_stages=T.stages):
        tile = start + (i // CHUNKS) * programs
        first = (i % CHUNKS) * DEPTH
        is_latent = tile < LATENT_TILES
        is_key = (tile >= LATENT_TILES) & (tile < LATENT_TILES + INDEX_TILES)
        word = tl.where(is_latent, LATENTS, tl.where(is_key, INDEX_KEY, INDEX_GATE))
        local = tile - tl.where(is_latent, 0, tl.where(is_key, LATENT_TILES, LATENT_TILES + INDEX_TILES))
        width = tl.where(is_latent, LATENT_WIDTH, G.index_head_dim)
        matrix, scales = matrix_in(record, word, STORAGE)
        column = local * COLUMNS + tl.arange(0, COLUMNS)
        weight_row = tl.minimum(local * COLUMNS + folded_columns(COLUMNS), width - 1)
        acc = add_chunk(acc, x, G.hidden, rows, matrix, scales, weight_row, first, G.hidden, DEPTH, STORAGE, BACKEND)
        if i % CHUNKS == CHUNKS - 1:
            offset = tl.where(is_latent, W.latents, tl.where(is_key, W.index_key, W.index_gate))
            out = (workspace + offset).to(tl.pointer_type(tl.bfloat16), bitcast=True)
            stored = (row < rows) & (column < width)[None, :]
            tl.store(out + row * width + column[None, :], unfold(acc, COLUMNS).to(tl.bfloat16), mask=stored)
            acc = zero_tile(COLUMNS)


@triton.jit
def project_head_weight(workspace, record, x, head, rows, W: tl.constexpr, G: tl.constexpr):
    """fp32(y) . w of one index head, in fp32 throughout (MODEL_MATH 3.3): no matrix unit rounds its operands here."""
    out = region(workspace, W.head_weights, tl.float32)
    k = tl.arange(0, G.hidden)
    w = tl.load(pointer(record, HEAD_WEIGHTS, tl.float32) + head * G.hidden + k)
    for row in range(rows):
        y = tl.load(x + row * G.hidden + k).to(tl.float32)
        tl.store(out + row * G.index_heads + head, tl.sum(y * w, 0))


@triton.jit
def mla_query(
    workspace, record, step, rows, VERIFY: tl.constexpr, TILED: tl.constexpr,
    W: tl.constexpr, G: tl.constexpr, T: tl.constexpr, F: tl.constexpr, BACKEND: tl.constexpr,
):  # fmt: skip
    """Queries of attention and indexer; the caches' new latents, ring rows and closed pools.

    Tasks: one whole output tile; one request's cache writes, in the last programs, which have no tile.
    """
    COLUMNS: tl.constexpr = T.query_columns
    QUERY_TILES: tl.constexpr = (G.mla_heads * G.qk_head_dim + COLUMNS - 1) // COLUMNS
    TILES: tl.constexpr = QUERY_TILES + (G.index_heads * G.index_head_dim + COLUMNS - 1) // COLUMNS
    pid = tl.program_id(0)
    programs = tl.num_programs(0)
    normed_query_latents(workspace, record, rows, W, G)
    program_barrier(BACKEND)
    x = private(workspace, W.query_latent, W.query_latent_bytes, tl.bfloat16)
    row = row_index()[:, None]
    requests = rows // step.tokens
    writers = tl.maximum(tl.minimum(requests, programs // T.programs_a_writer), 1)
    # a lone program does both
    workers = tl.maximum(programs - writers, 1)
    QUERY_STORAGE: tl.constexpr = F.query
    INDEX_STORAGE: tl.constexpr = F.index_query
    if QUERY_STORAGE == INDEX_STORAGE:
        query_tiles(workspace, record, x, row, rows, workers, 0, TILES, QUERY_STORAGE, W, G, T, BACKEND)
    else:
        query_tiles(workspace, record, x, row, rows, workers, 0, QUERY_TILES, QUERY_STORAGE, W, G, T, BACKEND)
        query_tiles(workspace, record, x, row, rows, workers, QUERY_TILES, TILES, INDEX_STORAGE, W, G, T, BACKEND)
    from_last = programs - 1 - pid
    for request in range(tl.where(from_last < writers, from_last, requests), requests, writers):
        for token in range(0, step.tokens):
            write_latent(workspace, record, step, request * step.tokens + token, W, G)
        close_pools(workspace, record, step, request, VERIFY, TILED, W, G, BACKEND)


@triton.jit
def query_tiles(
    workspace, record, x, row, rows, workers, FIRST: tl.constexpr, END: tl.constexpr, STORAGE: tl.constexpr,
    W: tl.constexpr, G: tl.constexpr, T: tl.constexpr, BACKEND: tl.constexpr,
):  # fmt: skip
    """The tiles [FIRST, END) of `mla_query`, for `workers` programs: the attention's, then the index's."""
    COLUMNS: tl.constexpr = T.query_columns
    DEPTH: tl.constexpr = chunk_depth(T.query_depth, G.q_rank, STORAGE)
    CHUNKS: tl.constexpr = G.q_rank // DEPTH
    QUERY_WIDTH: tl.constexpr = G.mla_heads * G.qk_head_dim
    INDEX_WIDTH: tl.constexpr = G.index_heads * G.index_head_dim
    QUERY_TILES: tl.constexpr = (QUERY_WIDTH + COLUMNS - 1) // COLUMNS
    start = own_tile(FIRST, workers)
    acc = zero_tile(COLUMNS)
    tiles = tl.where(tl.program_id(0) < workers, (END - start + workers - 1) // workers, 0)
    for i in tl.range(0, tiles * CHUNKS, num_stages=T.stages):
        tile = start + (i // CHUNKS) * workers
        first = (i % CHUNKS) * DEPTH
        is_query = tile < QUERY_TILES
        local = tile - tl.where(is_query, 0, QUERY_TILES)
        width = tl.where(is_query, QUERY_WIDTH, INDEX_WIDTH)
        matrix, scales = matrix_in(record, tl.where(is_query, QUERY, INDEX_QUERY), STORAGE)
        column = local * COLUMNS + tl.arange(0, COLUMNS)
        weight_row = tl.minimum(local * COLUMNS + folded_columns(COLUMNS), width - 1)
        acc = add_chunk(acc, x, G.q_rank, rows, matrix, scales, weight_row, first, G.q_rank, DEPTH, STORAGE, BACKEND)
        if i % CHUNKS == CHUNKS - 1:
            offset = tl.where(is_query, W.query, W.index_query)
            out = (workspace + offset).to(tl.pointer_type(tl.bfloat16), bitcast=True)
            stored = (row < rows) & (column < width)[None, :]
            tl.store(out + row * width + column[None, :], unfold(acc, COLUMNS).to(tl.bfloat16), mask=stored)
            acc = zero_tile(COLUMNS)


@triton.jit
def normed_query_latents(workspace, record, rows, W: tl.constexpr, G: tl.constexpr):
    """RMSNorm of every row's q latent into this program's own region, bf16 [rows, q_rank]."""
    latents = region(workspace, W.latents, tl.bfloat16)
    out = private(workspace, W.query_latent, W.query_latent_bytes, tl.bfloat16)
    column = tl.arange(0, W.q_rank_padded)
    inside = column < G.q_rank
    norm = tl.load(pointer(record, QUERY_NORM, tl.bfloat16) + column, mask=inside, other=0.0).to(tl.float32)
    for row in range(rows):
        x = tl.load(latents + row * (G.q_rank + G.latent) + column, mask=inside, other=0.0).to(tl.float32)
        normed = x * tl.rsqrt(tl.sum(x * x, 0) / G.q_rank + G.rms_eps) * norm
        tl.store(out + row * G.q_rank + column, normed.to(tl.bfloat16), mask=inside)


@triton.jit
def write_latent(workspace, record, step, row, W: tl.constexpr, G: tl.constexpr):
    """The row's normalised kv latent into its slot of the latent cache; slot 0 is padding and stays as it is."""
    latents = region(workspace, W.latents, tl.bfloat16)
    column = tl.arange(0, G.latent)
    x = tl.load(latents + row * (G.q_rank + G.latent) + G.q_rank + column).to(tl.float32)
    norm = tl.load(pointer(record, LATENT_NORM, tl.bfloat16) + column).to(tl.float32)
    normed = x * tl.rsqrt(tl.sum(x * x, 0) / G.latent + G.rms_eps) * norm
    slot = tl.load(step.cache_slots + row).to(tl.int64)
    pool = pointer(record, LATENT_POOL, tl.bfloat16)
    tl.store(pool + slot * G.latent + column, normed.to(tl.bfloat16), mask=(slot > 0) & (column >= 0))


@triton.jit
def mla_absorb(
    workspace, record, step, rows, VERIFY: tl.constexpr, TILED: tl.constexpr,
    W: tl.constexpr, G: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """The absorbed query q w_kc of every head, and the indexer's scores of rows that see more pools than they select.

    Tasks: (head, tile of the latent); then (row, page of pools).
    """
    COLUMNS: tl.constexpr = T.absorb_columns
    TILES: tl.constexpr = (G.latent + COLUMNS - 1) // COLUMNS
    K: tl.constexpr = G.qk_head_dim
    query = region(workspace, W.query, tl.bfloat16)
    out = region(workspace, W.absorbed, tl.bfloat16)
    matrix = pointer(record, KEY_UP, tl.bfloat16)
    row = row_index()[:, None]
    pid = tl.program_id(0)
    programs = tl.num_programs(0)
    for task in tl.range(pid, G.mla_heads * TILES, programs, num_stages=T.short_stages):
        head = task // TILES
        column = (task % TILES) * COLUMNS + tl.arange(0, COLUMNS)
        local = (task % TILES) * COLUMNS + folded_columns(COLUMNS)
        weight_row = head * G.latent + tl.minimum(local, G.latent - 1)
        acc = zero_tile(COLUMNS)
        acc = gemv.add_chunk(acc, query + head * K, G.mla_heads * K, rows, matrix, weight_row, 0, K, K)
        stored = (row < rows) & (column < G.latent)[None, :]
        place = (row * G.mla_heads + head) * G.latent + column[None, :]
        tl.store(out + place, unfold(acc, COLUMNS).to(tl.bfloat16), mask=stored)
    score_pages(workspace, record, step, rows, VERIFY, TILED, W, G, T)


@triton.jit
def key_count(length, G: tl.constexpr):
    """Tokens that a row of so many visible ones attends: those of its pools, and the tail."""
    return tl.minimum(length // G.pool, G.selected_pools) * G.pool + length % G.pool


@triton.jit
def attend_tokens(row, length, request_row, selected, req_to_token, stride, first, KEYS: tl.constexpr, G: tl.constexpr):
    """Cache slots of a row's keys [first, first + KEYS), and which of them exist: selected pools, then the tail."""
    j = first + tl.arange(0, KEYS)
    pools = length // G.pool
    keys = key_count(length, G)
    history = keys - length % G.pool
    is_history = j < history
    entry = j // G.pool
    picked = tl.load(selected + row * G.selected_pools + entry, mask=is_history & (pools > G.selected_pools), other=0)
    pool = tl.where(pools > G.selected_pools, picked, entry)
    token = tl.where(is_history, pool * G.pool + j % G.pool, pools * G.pool + (j - history))
    exists = j < keys
    table = req_to_token + request_row * stride
    slot = tl.load(table + token, mask=exists, other=0).to(tl.int64)
    return slot, exists


@triton.jit
def mla_attend(workspace, record, step, rows, VERIFY: tl.constexpr, W: tl.constexpr, G: tl.constexpr, T: tl.constexpr):
    """Unnormalised attention of some heads over one chunk of a row's keys. Task: (row, head block, key chunk).

    Chunk borders depend on the row's own length alone. Probabilities are rounded to bf16 before they meet the values,
    as in SGLang's GPU kernels (tilelang_kernel.py:225-240).
    """
    HEADS: tl.constexpr = T.attend_heads
    KEYS: tl.constexpr = T.attend_keys
    HEAD_BLOCKS: tl.constexpr = (G.mla_heads + HEADS - 1) // HEADS
    absorbed = region(workspace, W.absorbed, tl.bfloat16)
    selected = region(workspace, W.selected, tl.int32)
    partial = region(workspace, W.partial, tl.float32)
    partial_max = region(workspace, W.partial_max, tl.float32)
    partial_sum = region(workspace, W.partial_sum, tl.float32)
    pool = pointer(record, LATENT_POOL, tl.bfloat16)
    column = tl.arange(0, G.latent)[None, :]
    TASKS: tl.constexpr = HEAD_BLOCKS * W.attend_chunks
    for task in range(tl.program_id(0), rows * TASKS, tl.num_programs(0)):
        row = task // TASKS
        chunk = task % TASKS // HEAD_BLOCKS
        head = task % HEAD_BLOCKS * HEADS + tl.arange(0, HEADS)
        length = row_length(step, row, VERIFY)
        if chunk * KEYS < key_count(length, G):
            request_row = tl.load(step.request_rows + row // step.tokens).to(tl.int64)
            slot, exists = attend_tokens(
                row, length, request_row, selected, step.req_to_token, step.req_to_token_stride, chunk * KEYS, KEYS, G
            )
            key = tl.load(pool + slot[:, None] * G.latent + column, mask=exists[:, None] & (column >= 0), other=0.0)
            known = head < G.mla_heads
            place = row * G.mla_heads + head
            q = tl.load(absorbed + place[:, None] * G.latent + column, mask=known[:, None] & (column >= 0), other=0.0)
            score = tl.dot(q, key.T) * (G.qk_head_dim**-0.5)
            score = tl.where(exists[None, :], score, float("-inf"))
            highest = tl.max(score, 1)
            probability = tl.exp(score - highest[:, None])
            value = tl.dot(probability.to(tl.bfloat16), key)
            out = (row * W.attend_chunks + chunk) * G.mla_heads + head
            tl.store(partial + out[:, None] * G.latent + column, value, mask=known[:, None] & (column >= 0))
            tl.store(partial_max + out, highest, mask=known)
            tl.store(partial_sum + out, tl.sum(probability, 1), mask=known)


@triton.jit
def mla_merge(
    workspace, record, step, rows, VERIFY: tl.constexpr,
    W: tl.constexpr, G: tl.constexpr, T: tl.constexpr, BACKEND: tl.constexpr,
):  # fmt: skip
    """u = sum of the chunks, then the values u w_vc. Task: (head, tile of the head's values).

    Two passes over the chunks: first their maxima, then all of them weighted, so no chunk waits for the one before.
    """
    COLUMNS: tl.constexpr = T.merge_columns
    DEPTH: tl.constexpr = T.merge_depth
    TILES: tl.constexpr = (G.v_head_dim + COLUMNS - 1) // COLUMNS
    out = region(workspace, W.attended, tl.bfloat16)
    matrix = pointer(record, VALUE_UP, tl.bfloat16)
    x = private(workspace, W.merged, W.merged_bytes, tl.bfloat16)
    row = row_index()[:, None]
    for task in range(tl.program_id(0), G.mla_heads * TILES, tl.num_programs(0)):
        head = task // TILES
        for merged_row in range(rows):
            merge_chunks(workspace, x, merged_row, head, row_length(step, merged_row, VERIFY), W, G, T)
        program_barrier(BACKEND)
        column = (task % TILES) * COLUMNS + tl.arange(0, COLUMNS)
        acc = zero_tile(COLUMNS)
        local = (task % TILES) * COLUMNS + folded_columns(COLUMNS)
        weight_row = head * G.v_head_dim + tl.minimum(local, G.v_head_dim - 1)
        for first in tl.range(0, G.latent, DEPTH, num_stages=T.short_stages):
            acc = gemv.add_chunk(acc, x, G.latent, rows, matrix, weight_row, first, G.latent, DEPTH)
        stored = (row < rows) & (column < G.v_head_dim)[None, :]
        place = (row * G.mla_heads + head) * G.v_head_dim + column[None, :]
        tl.store(out + place, unfold(acc, COLUMNS).to(tl.bfloat16), mask=stored)
        program_barrier(BACKEND)


@triton.jit
def merge_chunks(workspace, x, row, head, length, W: tl.constexpr, G: tl.constexpr, T: tl.constexpr):
    """A row's and head's attention output over all its chunks into x[row], bf16 [latent]."""
    partial = region(workspace, W.partial, tl.float32)
    partial_max = region(workspace, W.partial_max, tl.float32)
    partial_sum = region(workspace, W.partial_sum, tl.float32)
    chunks = (key_count(length, G) + T.attend_keys - 1) // T.attend_keys
    chunk = tl.arange(0, W.attend_chunks_padded)
    LATENT: tl.constexpr = G.latent
    column = tl.arange(0, LATENT)
    first = row * W.attend_chunks * G.mla_heads + head
    highest = tl.load(partial_max + first + chunk * G.mla_heads, mask=chunk < chunks, other=float("-inf"))
    top = tl.max(highest, 0)
    sums = tl.load(partial_sum + first + chunk * G.mla_heads, mask=chunk < chunks, other=0.0)
    total = tl.sum(tl.exp(highest - top) * sums, 0)
    u = tl.zeros([LATENT], tl.float32)
    for c in range(chunks):
        scale = tl.exp(tl.load(partial_max + first + c * G.mla_heads) - top)
        u += scale * tl.load(partial + (first + c * G.mla_heads) * G.latent + column)
    tl.store(x + row * G.latent + column, (u / total).to(tl.bfloat16))
