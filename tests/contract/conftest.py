from __future__ import annotations

import pytest

from glm53_mono.upstream.contract import check
from glm53_mono.upstream.reads import SGLANG_READS
from glm53_mono.upstream.source import SourceTree, installed_root


@pytest.fixture(scope="session")
def installed() -> SourceTree:
    """The installed SGLang, every module that the contract looks at parsed."""
    tree = SourceTree(installed_root())
    check(SGLANG_READS, tree)
    return tree
