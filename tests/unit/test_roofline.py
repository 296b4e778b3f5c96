"""The prediction against what was measured on the H200, and what moves it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from glm53_mono.checkpoint.config import model_config
from glm53_mono.cli.barrier_model import ADDITION_NS, barrier
from glm53_mono.cli.main import app
from glm53_mono.cli.roofline import ASSUMPTIONS, DEVICES, Prediction, distinct_experts, predict
from glm53_mono.weights.published import CHECKPOINTS

MEASUREMENTS = (Path(__file__).resolve().parents[2] / "docs" / "measurements.md").read_text()
CONFIG = model_config(45, 32, mtp=False)
"""The model that was measured."""

CONTEXT = 1024


def measured() -> dict[int, tuple[float, float, float]]:
    """By rows: bytes of weights in GB, distinct experts a layer, milliseconds."""
    line = r"^\| (\d+) \| ([\d.]+) GB \| ([\d.]+)[^|]*\| [\d.]+ \| ([\d.]+) \| [\d.]+ TB/s"
    rows = re.findall(line, MEASUREMENTS, re.M)
    return {int(count): (float(size), float(experts), float(ms)) for count, size, experts, ms in rows}


def h200(rows: int, context: int = CONTEXT) -> Prediction:
    (found,) = predict(DEVICES["h200"], CONFIG, [rows], [context], 1, "bf16")
    return found


def test_the_h200_is_predicted_within_a_tenth() -> None:
    found = measured()
    assert found.keys() == {1, 8}
    for rows, (gigabytes, experts, ms) in found.items():
        predicted = h200(rows)
        # Ours are the step's bytes: the recurrent states are among them.
        assert predicted.gigabytes == pytest.approx(gigabytes, rel=0.1)
        assert distinct_experts(32, 8, rows) == pytest.approx(experts, rel=0.01)
        assert predicted.ms[0] == predicted.ms[1] == pytest.approx(ms, rel=0.1)
    # The bytes alone do not predict a narrow step.
    assert h200(1).floor_ms != pytest.approx(found[1][2], rel=0.1)


def test_long_contexts_add_a_phase_a_sparse_layer() -> None:
    short, long = h200(1), h200(1, 8192)
    assert long.phases - short.phases == 11
    assert long.gigabytes > short.gigabytes


def test_ranks_share_the_bytes_and_add_reductions() -> None:
    one, four = (predict(DEVICES["mi355x"], CONFIG, [1], [CONTEXT], tp, "bf16")[0] for tp in (1, 4))
    assert one.gigabytes / 4 < four.gigabytes < one.gigabytes / 3
    assert four.phases - one.phases == 2 * 45 + 1
    assert four.ms[0] < four.ms[1]


def test_formats_shrink_what_they_store() -> None:
    sizes = {name: predict(DEVICES["mi355x"], CONFIG, [8], [CONTEXT], 1, name)[0].gigabytes for name in CHECKPOINTS}
    # Experts are most of it: half and a quarter of their bytes, and all of what stays bf16.
    assert 0.5 < sizes["fp8"] / sizes["bf16"] < 0.75
    assert 0.3 < sizes["mxfp4"] / sizes["bf16"] < 0.6


@pytest.mark.parametrize(("name", "megabytes"), [("fp8", 25.17), ("mxfp4", 13.37)])
def test_an_expert_has_the_published_size(name: str, megabytes: float) -> None:
    """More rows read more experts; what else they read is the same in every format."""

    def growth(name: str) -> float:
        few, many = predict(DEVICES["h200"], CONFIG, [1, 8], [CONTEXT], 1, name)
        return many.gigabytes - few.gigabytes

    more = 42 * (round(distinct_experts(32, 8, 8)) - 8)
    plain = 3 * 2048 * 4096 * 2 / 1e6
    assert plain - 1e3 * (growth("bf16") - growth(name)) / more == pytest.approx(megabytes, rel=1e-3)


def test_few_experts_of_shapes_stand_for_all() -> None:
    """Experts that no row chose cost their router rows alone."""
    found = predict(DEVICES["h200"], CONFIG, [1], [CONTEXT], 1, "bf16")[0].gigabytes
    config = model_config(45, 64, mtp=False)
    more = predict(DEVICES["h200"], config, [1], [CONTEXT], 1, "bf16")[0].gigabytes
    router = 42 * 32 * 4096 * 2 / 1e9
    assert more - found == pytest.approx(router, rel=0.01)


@pytest.mark.parametrize("option", ["--predict", "--model"])
def test_the_command_says_that_it_predicts(option: str) -> None:
    done = CliRunner().invoke(app, ["bench", option, "mi355x", "--tp", "4", "--weights", "mxfp4", "--rows", "1"])
    assert done.exit_code == 0, done.stderr
    assert "PREDICTED, not measured: decode steps on mi355x, TP 4, mxfp4" in done.stdout
    assert done.stdout.count("assumed: ") == len((*DEVICES["mi355x"].assumptions, *ASSUMPTIONS))
    assert "modelled: a barrier of 256 programs, flat: " in done.stdout
    assert "modelled: a barrier of 256 programs, over 8 chiplets: " in done.stdout


def test_a_device_of_one_die_has_no_chiplets_to_model() -> None:
    done = CliRunner().invoke(app, ["bench", "--predict", "h200", "--rows", "1"])
    assert done.exit_code == 0 and "modelled" not in done.stdout


def test_a_barrier_over_chiplets_has_a_shorter_queue_and_more_trips() -> None:
    """The model's two terms by hand, for an MI355X and for grids at its edges."""
    flat, over = barrier(256, 1), barrier(256, 8)
    assert flat.microseconds() == pytest.approx((256 * 0.0286 + 0.626, 256 * 0.0286 + 1.152))
    assert over.microseconds() == pytest.approx((40 * 0.0286 + 3 * 0.626, 40 * 0.0286 + 3 * 1.152))
    assert over.microseconds()[1] < flat.microseconds()[0]
    # One program a chiplet meets nobody: all that is added is trips.
    assert barrier(8, 8).microseconds()[0] > barrier(8, 1).microseconds()[1]
    assert barrier(256, 8).longest_line == 32 and barrier(250, 8).longest_line == 32 and barrier(3, 8).queue == 4


def test_an_additions_price_is_that_of_the_measurement_it_comes_from() -> None:
    assert barrier(2048, 1).queue * ADDITION_NS == pytest.approx(58_500, rel=0.01)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--predict", "b200"], "--predict 'b200' is not one of h200, mi355x"),
        (["--tp", "4"], "--tp 4 is for --predict; a server's own arguments stand behind --"),
        (["--weights", "fp8"], "--weights fp8 is for --predict; a server's own arguments stand behind --"),
        (["--predict", "h200", "--weights", "int4"], "--weights 'int4' is not one of bf16, fp8, mxfp4"),
        (["--predict", "h200", "--tp", "3"], "--tp 3: tp_size 3 is not one of 1, 2, 4, 8"),
        (["--predict", "h200", "--rows", "9"], "--rows 9 is more than the 8 rows of the widest step"),
        (["--predict", "h200", "--", "--tp", "2"], "--predict h200 predicts the published model's steps"),
    ],
)
def test_bad_arguments_are_one_line(arguments: list[str], says: str) -> None:
    done = CliRunner().invoke(app, ["bench", *arguments])
    assert done.exit_code == 2 and done.stdout == ""
    assert done.stderr.startswith(f"glm53-mono bench: {says}") and done.stderr.count("\n") == 1
