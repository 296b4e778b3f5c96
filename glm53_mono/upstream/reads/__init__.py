"""SGLANG_READS: everything that this package reads of SGLang."""

from __future__ import annotations

from glm53_mono.upstream.contract import OneOf, Read
from glm53_mono.upstream.reads.bench import BENCH_READS
from glm53_mono.upstream.reads.model import MODEL_READS
from glm53_mono.upstream.reads.monokernel import MONOKERNEL_READS
from glm53_mono.upstream.reads.parts import PARTS_READS
from glm53_mono.upstream.reads.pools import POOL_READS
from glm53_mono.upstream.reads.server import SERVER_READS
from glm53_mono.upstream.reads.step import STEP_READS

SGLANG_READS: tuple[Read | OneOf, ...] = (
    *MONOKERNEL_READS,
    *SERVER_READS,
    *MODEL_READS,
    *STEP_READS,
    *POOL_READS,
    *PARTS_READS,
    *BENCH_READS,
)
