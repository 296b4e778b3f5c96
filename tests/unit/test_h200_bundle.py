"""What `.ci/h200` carries to a machine without a network, how it is unpacked there, and how runs end."""

from __future__ import annotations

import shlex
import sys
import time
import tomllib
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / ".ci" / "h200"))

import bundle
import needs
import pins
import run
import unpack

SGLANG = (ROOT / "requirements" / "sglang.txt").read_text()


# What is pinned


def test_the_bundle_carries_the_sglang_that_is_tested() -> None:
    assert pins.read_pins().carried["sglang"] == pins.exact_versions(SGLANG)["sglang"]


def test_a_version_of_its_own_is_refused() -> None:
    text = (ROOT / ".ci" / "h200" / "pins.toml").read_text()
    other = text.replace('"sglang",\n    "sglang-kernel', '"sglang==0.5.22",\n    "sglang-kernel')
    assert other != text
    with pytest.raises(pins.PinError, match=r"sglang has the version .* in requirements/ already"):
        pins.parse(other, SGLANG)


@pytest.mark.parametrize(
    ("packages", "complaint"),
    [
        (["new"], "new has no version"),
        (["new>=1"], "pins no exact version"),
        (["new==1", "New==1"], "new is carried twice"),
        (["known==1"], "known has the version 2 in requirements/ already"),
    ],
)
def test_pins_that_are_not_exact_are_refused(packages: list[str], complaint: str) -> None:
    with pytest.raises(pins.PinError, match=complaint):
        pins.carried_versions(packages, {"known": "2"})


def test_a_known_version_is_taken_over() -> None:
    assert pins.carried_versions(["Known", "new==1"], {"known": "2"}) == {"known": "2", "new": "1"}


# What it needs


def small(**changes: object) -> pins.Pins:
    """Pins of two packages, on a machine with torch."""
    both = {"server": "1", "helper": "2"}
    said = replace(pins.read_pins(), carried=both, roots=frozenset({"server"}), machine={"torch": "2.11"}, unmet={})
    return replace(said, **changes)


ASKED = {"server": ["helper>=2", "torch", 'windows; sys_platform == "win32"', 'more; extra == "all"'], "helper": []}


def test_requirements_that_are_met() -> None:
    assert needs.complaints(ASKED, small()) == []
    assert needs.complaints(ASKED, small(machine={"torch": ""})) == []


@pytest.mark.parametrize(
    ("asked", "changes", "complaint"),
    [
        (ASKED | {"helper": ["gone"]}, {}, "helper asks for gone: neither carried nor on the machine"),
        (ASKED | {"helper": ["torch>3"]}, {}, "helper asks for torch>3: on the machine is 2.11"),
        (ASKED | {"helper": ["server<1"]}, {}, "helper asks for server<1: carried is 1"),
        ({"server": ASKED["server"]}, {}, "helper is in pins.toml and not in the bundle"),
        (ASKED | {"third": []}, {}, "third is in the bundle and not in pins.toml"),
        (ASKED | {"server": ["torch"]}, {}, "helper is carried and nothing asks for it"),
        (ASKED, {"machine": {"torch": "2", "jax": ""}}, "jax is listed in [machine] and nothing asks for it"),
        (ASKED, {"unmet": {"torch": "old"}}, "torch is listed as unmet and is met"),
    ],
)
def test_what_is_missing_or_too_much_is_told(
    asked: dict[str, list[str]], changes: dict[str, object], complaint: str
) -> None:
    assert needs.complaints(asked, small(**changes)) == [complaint]


def test_what_is_known_to_be_missing_is_not_told() -> None:
    assert needs.complaints(ASKED | {"helper": ["gone"]}, small(unmet={"gone": "unused"})) == []


def test_a_pattern_that_leaves_nothing_out_is_refused(tmp_path: Path) -> None:
    for name in ("kept", "dropped"):
        (tmp_path / name).mkdir()
    bundle.leave_out(("dropped",), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    with pytest.raises(bundle.BundleError, match="nothing matches 'dropped'"):
        bundle.leave_out(("dropped",), tmp_path)


def test_a_part_that_is_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle.write_parts(b"12345", tmp_path)
    assert [(tmp_path / f"part-{number}").read_bytes() for number in range(2)] == [b"123", b"45"]
    monkeypatch.setattr(bundle, "TRANSFER", bundle.CACHE + bundle.tree_bytes() + 2)
    with pytest.raises(bundle.BundleError, match="cut into more parts"):
        bundle.write_parts(b"12345", tmp_path)


# Unpacking


@pytest.fixture
def packed(tmp_path: Path, seed: int) -> Path:
    """A bundle of one file, as the calls carry it: all of its parts."""
    site = tmp_path / "packed" / "site"
    site.mkdir(parents=True)
    (site / "random").write_bytes(np.random.default_rng(seed).bytes(1000))
    run.keep_cache(site, tmp_path / "packed" / "cache")
    (piece,) = (tmp_path / "packed" / "cache").iterdir()
    bundle.write_parts(piece.read_bytes(), tmp_path / "bundle")
    return tmp_path / "bundle"


def test_parts_come_in_two_calls(packed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    places = unpack.Places(tmp_path / "machine")
    late = (packed / "part-1").rename(tmp_path / "late")
    unpack.unpack(packed, places)
    assert "carry .bundle/digests and .bundle/part-1" in capsys.readouterr().out
    assert not places.stamp("site").exists()
    (packed / "part-0").unlink()
    late.rename(packed / "part-1")
    unpack.unpack(packed, places)
    original = packed.parent / "packed" / "site" / "random"
    assert (places.site / "random").read_bytes() == original.read_bytes()
    (places.site / "random").unlink()
    unpack.unpack(packed, places)
    assert not (places.site / "random").exists(), "unpacked again"


def test_a_part_of_another_bundle_is_refused(packed: Path, tmp_path: Path) -> None:
    (packed / "part-0").write_bytes(b"other")
    with pytest.raises(unpack.UnpackError, match="carry both from one bundle"):
        unpack.unpack(packed, unpack.Places(tmp_path / "machine"))


def test_compiled_kernels_come_back_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    before, after = unpack.Places(tmp_path / "before"), unpack.Places(tmp_path / "after")
    before.home.mkdir(parents=True)
    content = np.random.default_rng(seed).bytes(1000)
    (before.home / "kernel").write_bytes(content)
    monkeypatch.setattr(run, "PIECE", 400)
    (tmp_path / "bundle").mkdir()
    run.keep_cache(before.home, tmp_path / "bundle" / "cache")
    assert len(list((tmp_path / "bundle" / "cache").iterdir())) > 1
    unpack.unpack(tmp_path / "bundle", after)
    assert (after.home / "kernel").read_bytes() == content
    monkeypatch.setattr(run, "MOST_PIECES", 1)
    run.keep_cache(before.home, tmp_path / "bundle" / "cache")
    assert list((tmp_path / "bundle" / "cache").iterdir()) == []


# Runs


def test_a_run_ends_with_what_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "ENDING_S", 1)
    # deaf to the interrupt, with a child in a session of its own, as servers of the tests are
    child = "[sys.executable, '-c', 'import time; time.sleep(60)']"
    deaf = (
        "import signal, subprocess, sys, time; signal.signal(signal.SIGINT, signal.SIG_IGN); "
        f"print(subprocess.Popen({child}, start_new_session=True).pid, flush=True); time.sleep(60)"
    )
    started, variables = time.monotonic(), run.environment(unpack.Places(tmp_path), {})
    assert run.run_one([sys.executable, "-c", deaf], variables, tmp_path / "log", 2) == 124
    assert time.monotonic() - started < 30
    number = int((tmp_path / "log").read_text().split()[0])
    assert not psutil.pid_exists(number) or psutil.Process(number).status() == psutil.STATUS_ZOMBIE


def test_a_run_tells_its_status(tmp_path: Path) -> None:
    variables = run.environment(unpack.Places(tmp_path), {"TRITON_CACHE_DIR": "elsewhere", "PATH": "/bin"})
    script = "import os, sys; print(os.environ['HOME'], 'TRITON_CACHE_DIR' in os.environ); sys.exit(3)"
    assert run.run_one([sys.executable, "-c", script], variables, tmp_path / "log", 60) == 3
    assert (tmp_path / "log").read_text() == f"{tmp_path / 'home'} False\n"


def test_what_needs_sglang_does_not_start_without_it(tmp_path: Path) -> None:
    with pytest.raises(run.RunError, match="server needs SGLang"):
        run.run("server", [], unpack.Places(tmp_path), tmp_path / "out", limit_s=1, tail=1)


@pytest.mark.parametrize("job", run.JOBS.values(), ids=run.JOBS)
def test_jobs_name_what_exists(job: run.Job, tmp_path: Path) -> None:
    commands = job.commands(unpack.Places(tmp_path), tmp_path, ["--seed", "3"])
    paths = [word for command in commands for word in command if word.startswith(("test/", "tests/"))]
    assert [path for path in paths if not (ROOT / path).exists()] == []
    assert any(command[command.index("--seed") :][:2] == ["--seed", "3"] for command in commands if "--seed" in command)


def test_the_benchmark_is_readme_s() -> None:
    text = (ROOT / "README.md").read_text().replace("\\\n", " ")
    (line,) = (line for line in text.splitlines() if "glm53-mono bench --rows" in line)
    server = shlex.split(line.partition(" -- ")[2])
    assert server[:2] == ["--model-path", "/tmp/glm"]
    assert sorted(server[2:]) == sorted(run.BENCH_SERVER)


def test_pins_hold_nothing_twice() -> None:
    document = tomllib.loads((ROOT / ".ci" / "h200" / "pins.toml").read_text())
    assert document["machine"].keys().isdisjoint(pins.read_pins().carried)
