"""`glm53-mono bench` without a GPU: its options and refusals, and the report that it writes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from glm53_mono.checkpoint.config import model_config
from glm53_mono.cli import bench as module
from glm53_mono.cli.bench import (
    Only,
    OptionError,
    Options,
    arms_of,
    check_drafts,
    drawn_weights,
    measures_rows,
    parse_drafts_ms,
    parse_options,
    shapes_of,
)
from glm53_mono.cli.bench_measure import by_kind
from glm53_mono.cli.bench_report import Barriers, Launched, PhaseTime, Point, Report
from glm53_mono.cli.bench_times import Timing
from glm53_mono.cli.main import app
from glm53_mono.cli.step_bytes import StepBytes
from glm53_mono.kernels.record import Kind
from glm53_mono.program.phase import Access, Phase
from glm53_mono.upstream import bench_runner
from glm53_mono.upstream.bench_runner import MONOKERNEL, SGLANG, BenchError, BenchServer
from glm53_mono.upstream.launch import LaunchError, environment_kept
from glm53_mono.upstream.running import ServedStep
from tests.unit.servers import write_config

OPTIONS = Options(rows=None, contexts=(1024,), steps=50, only=Only.BOTH, randomise=None, seed=0, json=None)


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["bench", *arguments])


def server(*, monokernel: bool = True, load_format: str = "dummy", path: str = "/nowhere") -> BenchServer:
    arguments = SimpleNamespace(load_format=load_format)
    return BenchServer(None, SimpleNamespace(arguments=arguments), monokernel, path, 0.8)


# Options


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--rows", "1,x"), "--rows '1,x' is not a list of whole numbers from 1, such as 1,2,4,8"),
        (("--rows", "0"), "--rows '0' is not a list"),
        (("--rows", ""), "--rows '' is not a list"),
        (("--contexts", "-5"), "--contexts '-5' is not a list"),
        (("--steps", "0"), "--steps 0 is less than 1"),
        (("--seed", "-1"), "--seed -1 is less than 0"),
        (("--json", "/nowhere/out.json"), "--json /nowhere/out.json: its folder does not exist"),
        (("--json", "/"), "--json /: its folder does not exist, or it is one"),
        (("--only", "ours"), "'ours' is not one of"),
        (("--drafts-ms", "3"), "--drafts-ms '3' is not a list of drafts and milliseconds, such as 1=1.5,3=3.2"),
        (("--drafts-ms", "0=1.5"), "--drafts-ms '0=1.5' is not a list of drafts"),
        (("--drafts-ms", "3=-1"), "--drafts-ms '3=-1' is not a list of drafts"),
        (("--drafts-ms", "3=1,3=2"), "--drafts-ms '3=1,3=2' is not a list of drafts"),
        (("--drafts-ms", "3=1", "--predict", "h200"), "--drafts-ms is for a server that drafts"),
        ((), "no server arguments: name the server behind --"),
    ],
)
def test_bad_options_are_one_line(arguments: Sequence[str], sentence: str) -> None:
    done = run(*arguments)
    assert done.exit_code == 2 and done.stdout == ""
    assert sentence in done.stderr and done.stderr.count("\n") == 1


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = run("--", "--model-path", "/nowhere")
    assert done.exit_code == 2 and done.stderr.startswith("glm53-mono bench: no GPU is visible")


def test_options_are_parsed(tmp_path: Path) -> None:
    parsed = parse_options("1,8,1", "7", 3, Only.SGLANG, False, 5, tmp_path / "out.json")
    assert parsed == Options((1, 8), (7,), 3, Only.SGLANG, False, 5, tmp_path / "out.json")


def test_arms_follow_the_options_and_the_arguments() -> None:
    assert arms_of(OPTIONS, server()) == (MONOKERNEL, SGLANG)
    assert arms_of(replace(OPTIONS, only=Only.MONOKERNEL), server()) == (MONOKERNEL,)
    sglang = replace(OPTIONS, only=Only.SGLANG)
    assert arms_of(sglang, server()) == arms_of(sglang, server(monokernel=False)) == (SGLANG,)
    for only in (Only.BOTH, Only.MONOKERNEL):
        with pytest.raises(OptionError, match="do not ask for the monokernel: add --enable-amd-monokernel"):
            arms_of(replace(OPTIONS, only=only), server(monokernel=False))


def test_shapes_have_graphs_of_their_own() -> None:
    assert shapes_of(replace(OPTIONS, contexts=(5, 6)), (1, 8, 16), True) == [(1, 5), (1, 6), (8, 5), (8, 6)]
    assert shapes_of(OPTIONS, (1, 16), False) == [(1, 1024), (16, 1024)]
    assert shapes_of(replace(OPTIONS, rows=(8, 1)), (1, 8), True) == [(8, 1024), (1, 1024)]
    for rows, captured in (((3,), "1, 8 of up to 8"), ((1, 16), "1, 8 of up to 8")):
        with pytest.raises(OptionError, match=f"--rows {rows[-1]} has no graph of its own; captured: {captured}"):
            shapes_of(replace(OPTIONS, rows=rows), (1, 8, 16), True)


def test_shapes_of_verify_steps_are_whole_requests() -> None:
    """Graphs of 1, 2 and 4 requests of four rows: the kernel runs the first two."""
    assert shapes_of(OPTIONS, (1, 2, 4), True, 4) == [(4, 1024), (8, 1024)]
    assert shapes_of(OPTIONS, (1, 2, 4), False, 4) == [(4, 1024), (8, 1024), (16, 1024)]
    assert shapes_of(replace(OPTIONS, rows=(8,)), (1, 2, 4), True, 4) == [(8, 1024)]
    for rows in (1, 2, 16):
        with pytest.raises(OptionError, match=f"--rows {rows} has no graph .*4, 8 of up to 8 .* times 4 rows a req"):
            shapes_of(replace(OPTIONS, rows=(rows,)), (1, 2, 4), True, 4)


def test_launches_by_rows_are_a_drafting_servers() -> None:
    drafting = ServedStep("target_verify", 4)
    assert measures_rows(drafting, (MONOKERNEL, SGLANG)) and measures_rows(drafting, (MONOKERNEL,))
    assert not measures_rows(drafting, (SGLANG,))
    assert not measures_rows(ServedStep("decode", 1), (MONOKERNEL, SGLANG))


def test_milliseconds_of_drafts_are_parsed() -> None:
    assert parse_drafts_ms("1=1.5, 3=4") == {1: 1.5, 3: 4.0}


def test_weights_are_drawn_for_dummy_loads_alone(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(model_config(2, 8, "small", mtp=False)))
    dummy, real = server(path=str(tmp_path)), server(path=str(tmp_path), load_format="auto")
    assert drawn_weights(OPTIONS, dummy) is not None
    assert drawn_weights(replace(OPTIONS, randomise=False), dummy) is None
    assert drawn_weights(OPTIONS, real) is None
    with pytest.raises(OptionError, match="would overwrite a checkpoint's weights: it needs --load-format dummy"):
        drawn_weights(replace(OPTIONS, randomise=True), real)
    for content in (None, "{", "{}", json.dumps({"text_config": {"hidden_size": 3}})):
        (tmp_path / "config.json").unlink(missing_ok=True)
        if content is not None:
            (tmp_path / "config.json").write_text(content)
        with pytest.raises(OptionError, match=r"cannot tell the shapes of the weights from .*config.json: \w+"):
            drawn_weights(OPTIONS, dummy)


def test_errors_of_the_runner_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for error in (BenchError("no room"), LaunchError("no room")):

        def refuse(arguments: Sequence[str], error: Exception = error) -> None:
            raise error

        monkeypatch.setattr(bench_runner, "resolve", refuse)
        done = run("--", "--model-path", "/nowhere")
        assert done.exit_code == 2 and done.stderr.splitlines()[-1] == "glm53-mono bench: no room"


SERVERS = {
    "--tp 2": "--tp 2: the benchmark runs in one process; use --tp 1",
    "--disable-cuda-graph": "decode steps without CUDA graphs",
    "--speculative-algorithm NGRAM --speculative-num-draft-tokens 4 --speculative-ngram-max-bfs-breadth 1": (
        "--speculative-algorithm NGRAM: of drafts only those of EAGLE are measured"
    ),
    "--speculative-algorithm EAGLE --speculative-num-steps 8 --speculative-eagle-topk 1 "
    "--speculative-num-draft-tokens 9": "--speculative-num-draft-tokens 9 makes every step wider than 8 rows",
    "--no-such-argument": "SGLang does not parse these arguments",
}


@pytest.mark.parametrize("arguments", SERVERS)
def test_servers_that_cannot_be_measured_are_refused(arguments: str, tmp_path: Path) -> None:
    from glm53_mono.upstream import launch

    folder = write_config(tmp_path / "model")
    always = "--kv-cache-dtype bfloat16 --dsa-prefill-backend tilelang --dsa-decode-backend tilelang --device cuda"
    words = ["--model-path", str(folder), *always.split(), *arguments.split()]
    with (
        environment_kept(),
        launch.platform_of("sm_90"),
        pytest.raises((BenchError, LaunchError, OptionError), match=SERVERS[arguments]),
    ):
        check_drafts(bench_runner.resolve(words).server, {})


@pytest.mark.parametrize("monokernel", [False, True])
def test_a_server_that_can_be_measured_is_resolved(
    monokernel: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt.kernel_plugins.amd import binding

    from glm53_mono import plugin
    from glm53_mono.upstream import launch

    folder = write_config(tmp_path / "model")
    words = f"--model-path {folder} --kv-cache-dtype bfloat16 --dsa-prefill-backend tilelang --device cuda "
    words += "--dsa-decode-backend tilelang --load-format dummy --cuda-graph-bs-decode 1 4 --mem-fraction-static 0.7 "
    words += "--monokernel-backend amd" if monokernel else ""
    monkeypatch.setattr(binding, "device_isa", lambda: "sm_90")
    with environment_kept(), launch.platform_of("sm_90"):
        plugin.register()
        found = bench_runner.resolve(words.split())
        if monokernel:
            with pytest.raises(LaunchError, match=r"cannot run this setup: - [^\n]*fp8_e4m3[^\n]*$"):
                bench_runner.resolve([*words.split(), "--kv-cache-dtype", "fp8_e4m3"])
    assert (found.monokernel, found.model_path, found.mem_fraction) == (monokernel, str(folder), 0.7)
    check_drafts(found.server, {})
    with pytest.raises(OptionError, match="--drafts-ms is for a server that drafts: add its --speculative- arguments"):
        check_drafts(found.server, {3: 2.5})
    assert found.server.captured_batch_sizes == (1, 4) and found.server.arguments.load_format == "dummy"


def test_a_server_that_drafts_is_resolved(tmp_path: Path) -> None:
    from glm53_mono.upstream import launch

    words = f"--model-path {write_config(tmp_path / 'model')} --kv-cache-dtype bfloat16 --dsa-prefill-backend tilelang "
    words += "--dsa-decode-backend tilelang --device cuda --load-format dummy --cuda-graph-bs-decode 1 2 "
    words += "--speculative-algorithm NEXTN --speculative-num-steps 3 --speculative-eagle-topk 1 "
    words += "--speculative-num-draft-tokens 4"
    with environment_kept(), launch.platform_of("sm_90"):
        found = bench_runner.resolve(words.split())
    assert found.server.tokens_per_request == 4 and found.server.captured_batch_sizes == (1, 2)
    check_drafts(found.server, {3: 2.5})


# The report

BYTES = StepBytes(weights=3 * 10**9, experts=10**9, embedding=0, latents=0, index_keys=0, state=0)
LAUNCHED = Launched(Timing(2.0, 1.9, 2.1), 106, Barriers(400, 0.5), (8, 7), BYTES)
BOTH = Point(1, 1024, {MONOKERNEL: Timing(2.5, 2.4, 2.6), SGLANG: Timing(5.0, 4.9, 5.1)}, LAUNCHED)
ALONE = Point(4, 8192, {SGLANG: Timing(6.0, 5.9, 6.1)}, None)


def report(*points: Point) -> Report:
    return Report({"device": "some GPU"}, copy_bytes_per_s=4e12, head_bytes=10**9, points=list(points))


def test_a_point_as_numbers() -> None:
    """4 GB in 2 ms are half of 4 TB/s; with the head 5 GB in 2.5 and in 5 ms; 400 barriers of 0.5 us are 0.2 ms."""
    found, alone = report(BOTH, ALONE).as_dict()["points"]
    assert found["sglang_over_monokernel"] == 2.0
    assert found["launch"]["copy_bandwidth_fraction"] == pytest.approx(0.5)
    assert found["launch"]["served"] == 106
    assert found["arms"][MONOKERNEL]["copy_bandwidth_fraction"] == pytest.approx(0.5)
    assert found["arms"][SGLANG]["copy_bandwidth_fraction"] == pytest.approx(0.25)
    assert found["step_bytes"]["total"] == 4 * 10**9
    assert found["distinct_experts_mean"] == 7.5 and found["distinct_experts_by_layer"] == [8, 7]
    assert found["barriers"] == {
        "count": 400, "each_us": 0.5, "total_ms": pytest.approx(0.2), "launch_fraction": pytest.approx(0.1),
    }  # fmt: skip
    assert alone["sglang_over_monokernel"] is None and "launch" not in alone
    assert alone["arms"][SGLANG]["copy_bandwidth_fraction"] is None


def test_the_table_shows_every_point() -> None:
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(report(BOTH, ALONE).table())
    text = console.export_text()
    (first,) = (line.split() for line in text.splitlines() if "2.500" in line)
    (second,) = (line.split() for line in text.splitlines() if "6.000" in line)
    kept = [word for word in first if word not in "│┃|%"]
    assert " ".join(kept) == "1 1024 2.500 5.000 2.000 7.5 5.00 50.0 25.0 2.000 50.0 400 0.200 10.0"
    assert [word for word in second if word not in "│┃|%"] == ["4", "8192", "-", "6.000", *"-" * 10]


def test_json_is_written_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "out.json"
    report(BOTH).write(file)
    assert json.loads(file.read_text())["points"][0]["rows"] == 1
    before = file.read_text()

    def no_room(self: Path, text: str) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(Path, "write_text", no_room)
    with pytest.raises(OSError, match="no space"):
        report(BOTH, ALONE).write(file)
    assert file.read_text() == before and list(tmp_path.iterdir()) == [file]


def test_a_summary_is_of_its_times() -> None:
    assert Timing.of([3.0, 1.0, 2.0, 9.0]) == Timing(2.5, 1.0, 9.0)


def test_progress_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    module.Progress()("loading")
    found = capsys.readouterr()
    assert found.out == "" and found.err.startswith("glm53-mono bench:    0.0 s: loading")


PHASES = [Phase(kind, layer, Access()) for layer, kind in enumerate((Kind.MIX, Kind.MLA_SELECT, Kind.MIX, Kind.HEAD))]


@pytest.mark.parametrize(
    ("selects", "expected"),
    [
        (True, {"MIX": (2, 4.0, 8.0), "MLA_SELECT": (1, 10.0, 10.0), "HEAD": (1, 2.0, 2.0)}),
        (False, {"MIX": (2, 9.0, 18.0), "HEAD": (1, 2.0, 2.0)}),
    ],
)
def test_phases_take_what_the_clock_says(selects: bool, expected: dict[str, tuple[int, float, float]]) -> None:
    """A phase that was skipped has no stamp of its own launch: what stands there must not count."""
    clocks = [
        [0, 3_000, 13_000, 18_000, 20_000],
        [0, 3_000, 13_000, 18_000, 20_000],
        [0, 9_000, 90_000, 95_000, 99_000],
    ]
    if not selects:
        for clock in clocks:
            clock[1] = 777
    found = by_kind(PHASES, clocks, selects=selects)
    assert {phase.kind: (phase.count, phase.median_us, phase.total_us) for phase in found} == expected


def test_the_phases_of_a_point_are_a_table_and_in_the_json() -> None:
    found = report(replace(BOTH, launched=replace(LAUNCHED, phases=(PhaseTime("MIX", 90, 3.5, 319.0),))), ALONE)
    (table,) = found.phase_tables()
    assert [list(column.cells) for column in table.columns] == [["MIX"], ["90"], ["3.5"], ["319"]]
    (entry,) = found.as_dict()["points"][0]["phases"]
    assert entry == {"kind": "MIX", "count": 90, "median_us": 3.5, "total_us": 319.0}
    assert not list(report(BOTH, ALONE).phase_tables())
