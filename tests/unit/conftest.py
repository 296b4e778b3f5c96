"""What several unit tests start from."""

from __future__ import annotations

from pathlib import Path

import pytest

from glm53_mono import capabilities
from tests.unit.servers import write_config


@pytest.fixture(scope="session")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the published model's config.json, and nothing else."""
    return write_config(tmp_path_factory.mktemp("model") / "published")


@pytest.fixture
def everything_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plugin as it is once every capability exists."""
    monkeypatch.setattr(capabilities, "NOT_YET_BUILT", ())
