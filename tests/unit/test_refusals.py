"""Every refusal, through SGLang's real ServerArgs, load_plugins() and monokernel_disable_reasons()."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from glm53_mono import capabilities, refusals, spec
from glm53_mono.refusals import REFUSALS
from glm53_mono.upstream import launch
from tests.unit.refused_servers import CAPABILITY_ROWS, GEOMETRY_ROWS, ROWS, SGLANG_ROWS, Row
from tests.unit.servers import (
    CHAIN,
    EAGLE,
    PLAIN,
    SEED,
    ConfigChange,
    Judged,
    judge,
    quantized,
    quark,
    words,
    write_config,
)


def judge_row(row: Row, published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Judged:
    """What SGLang says against a row's server."""
    model = write_config(tmp_path / "model", *row.config) if row.config else published
    for name, value in row.environment.items():
        monkeypatch.setenv(name, value)
    arguments = [argument.format(model=model) if "{model}" in argument else argument for argument in row.arguments]
    if row.declared is not None:
        with pytest.raises(launch.LaunchError, match="SGLang refuses"):
            judge(arguments, model)
        arguments = SEED if set(EAGLE) <= set(row.arguments) else PLAIN
    judged = judge(arguments, model, declared=row.declared, without=row.name)
    assert judged.spec is spec.SPEC
    return judged


def assert_exactly(reasons: list[str], expected: tuple[str, ...]) -> None:
    """As many reasons as expected, each with its text."""
    assert len(reasons) == len(expected), reasons
    for reason, text in zip(reasons, expected, strict=True):
        assert text in reason


@pytest.mark.usefixtures("everything_built")
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_a_refused_setting_gives_exactly_its_reason(
    row: Row, published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged = judge_row(row, published, tmp_path, monkeypatch)
    assert_exactly(judged.reasons, row.expected)
    # Negative control: without its row in the table, nothing else holds the setting back.
    assert len(judged.reasons_without) == len(judged.reasons) - 1


@pytest.mark.usefixtures("everything_built")
@pytest.mark.parametrize("row", (*SGLANG_ROWS, *GEOMETRY_ROWS), ids=str)
def test_what_sglang_and_the_geometry_refuse_gives_exactly_its_reason(
    row: Row, published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_exactly(judge_row(row, published, tmp_path, monkeypatch).reasons, row.expected)


@pytest.mark.usefixtures("everything_built")
def test_the_tensor_dumper_is_refused(published: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # SGLang reads DUMPER_ENABLE when it imports the dumper, once a process.
    from sglang.srt.debug_utils.dumper import dumper

    monkeypatch.setattr(dumper, "_config", dumper._config)
    dumper.configure(enable=True)
    (reason,) = judge(SEED, published).reasons
    assert reason.startswith("DUMPER_ENABLE")


def test_every_refusal_has_a_server_that_proves_it() -> None:
    proven = {row.name for row in ROWS} | {"tensor dumper"}
    assert proven == {refusal.name for refusal in REFUSALS}


def test_names_and_sentences_are_one_a_row() -> None:
    table = (*REFUSALS, *capabilities.NOT_YET_BUILT)
    assert len({row.name for row in table}) == len(table)
    assert len({row.sentence for row in table}) == len(table)


@pytest.mark.usefixtures("everything_built")
def test_reasons_come_all_at_once(published: Path) -> None:
    arguments = (
        *SEED,
        *words("--speculative-num-steps 8 --speculative-num-draft-tokens 9"),
        "--ep-size",
        "4",
        "--kv-canary",
        "log",
        "--enable-pdmux",
    )
    assert_exactly(
        judge(arguments, published).reasons,
        ("expert parallelism", "draft-tokens 9 makes every step wider", "--kv-canary", "--enable-pdmux"),
    )


@pytest.mark.parametrize("row", CAPABILITY_ROWS, ids=str)
def test_a_missing_capability_gives_its_reason(
    row: Row, published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_config(tmp_path / "model", *row.config) if row.config else published
    for name, value in row.environment.items():
        monkeypatch.setenv(name, value)
    assert_exactly(judge(row.arguments, model, declared=row.declared).reasons, row.expected)


def test_every_missing_capability_has_a_server_that_proves_it() -> None:
    assert {row.name for row in CAPABILITY_ROWS} == {row.name for row in capabilities.NOT_YET_BUILT}


@pytest.mark.usefixtures("everything_built")
@pytest.mark.parametrize(
    ("arguments", "config"),
    [
        (SEED, ()),
        (PLAIN, ()),
        ((*PLAIN, *words("--speculative-algorithm NEXTN"), *CHAIN), ()),
        ((*PLAIN, *words("--speculative-algorithm EAGLE")), ()),
        ((*SEED, *words("--speculative-num-steps 7 --speculative-num-draft-tokens 8")), ()),
        ((*SEED, *words("--tp 1")), ()),
        ((*SEED, *words("--tp 2")), ()),
        ((*SEED, *words("--tp 8")), ()),
        ((*SEED, *words("--disable-radix-cache")), ()),
        ((*SEED, *words("--disable-cuda-graph")), ()),
        ((*SEED, *words("--cuda-graph-bs-decode 2 8")), ()),
        ((*SEED, *words("--enable-return-hidden-states")), ()),
        ((*SEED, *words("--load-format dummy")), ()),
        (SEED, (quantized,)),
        (SEED, (quark,)),
    ],
)
def test_what_can_be_served_is_accepted(
    arguments: tuple[str, ...], config: tuple[ConfigChange, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if quark in config:
        monkeypatch.setenv("SGLANG_USE_AITER", "1")
    judged = judge(arguments, write_config(tmp_path / "model", *config))
    assert judged.reasons == []
    assert judged.spec is spec.SPEC


@pytest.mark.usefixtures("everything_built")
def test_a_cut_down_model_is_accepted(tmp_path: Path) -> None:
    assert judge(SEED, write_config(tmp_path / "model", layers=8)).reasons == []


@dataclass(frozen=True)
class WithoutPdmux:
    """SGLang's view of a server's arguments, one argument short."""

    cfg: Any

    def __getattr__(self, name: str) -> Any:
        if name == "enable_pdmux":
            raise AttributeError(name)
        return getattr(self.cfg, name)


def test_an_argument_that_sglang_no_longer_has_is_named(published: Path) -> None:
    resolved = judge(SEED, published).launch
    reasons = spec.config_disable_reasons(WithoutPdmux(resolved.cfg), resolved.model_config.hf_config)
    assert_exactly(reasons, ("this SGLang has no server argument enable_pdmux",))


def test_a_refusal_formats_what_it_found() -> None:
    row = refusals.Refusal("size", lambda server: server.size > 1 and server.size, "size {found} is not 1")

    @dataclass
    class Sized:
        size: int

    assert row.reason(Sized(1)) is None
    assert row.reason(Sized(3)) == "size 3 is not 1"
