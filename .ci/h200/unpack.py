"""Unpacks on the machine what its calls have carried there; what is unpacked already stays."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

BUNDLE = Path(__file__).resolve().parents[2] / ".bundle"
"""Where a call puts what it carries."""

DIGESTS = "digests"
"""Names the parts in order; the format is that of sha256sum."""

ROOT = Path("/opt/glm53-h200")
"""Where everything lies on the machine; compiled kernels remember their folder, so it is the same on each."""


class UnpackError(RuntimeError):
    """What was carried cannot be unpacked; the message says what to carry."""


@dataclass(frozen=True)
class Places:
    """Folders on the machine.

    Attributes:
        root: holds all others.
    """

    root: Path = ROOT

    @property
    def parts(self) -> Path:
        """Parts that have come, until the last one has."""
        return self.root / "parts"

    @property
    def site(self) -> Path:
        """SGLang and what it needs."""
        return self.root / "site"

    @property
    def project(self) -> Path:
        """This project, installed."""
        return self.root / "project"

    @property
    def home(self) -> Path:
        """The home folder of every run, so that whatever any compiler keeps lies in it."""
        return self.root / "home"

    @property
    def scratch(self) -> Path:
        """Temporary files of the tests, models among them."""
        return self.root / "scratch"

    def stamp(self, name: str) -> Path:
        """A file that says what `name` was unpacked from."""
        return self.root / f"{name}.unpacked"


def unpack(bundle: Path, places: Places) -> None:
    """Unpack the bundle if all of its parts have come, and the compiled kernels of an earlier run if they have.

    Raises:
        UnpackError: a part is not what the digests say.
    """
    places.root.mkdir(parents=True, exist_ok=True)
    if (bundle / DIGESTS).exists():
        unpack_parts(bundle, places)
    unpack_cache(sorted((bundle / "cache").glob("*")), places)


def unpack_parts(bundle: Path, places: Places) -> None:
    """Keep the parts of this call; unpack them once the last has come."""
    text = (bundle / DIGESTS).read_text()
    if is_stamped(places.stamp("site"), text):
        print("the bundle is unpacked already")
        return
    places.parts.mkdir(exist_ok=True)
    expected = {name: digest for digest, name in map(str.split, text.splitlines())}
    for name, digest in expected.items():
        if (bundle / name).exists():
            if sha256([bundle / name]) != digest:
                raise UnpackError(f"{bundle / name} is not what {DIGESTS} says: carry both from one bundle")
            shutil.copyfile(bundle / name, places.parts / name)
    missing = [name for name, digest in expected.items() if not is_part(places.parts / name, digest)]
    if missing:
        print(f"SGLang is not unpacked yet: carry .bundle/{DIGESTS} and .bundle/{missing[0]} in another call")
        return
    shutil.rmtree(places.site, ignore_errors=True)
    extract([places.parts / name for name in expected], places.site)
    places.stamp("site").write_text(text)
    shutil.rmtree(places.parts)
    print(f"SGLang is unpacked in {places.site}")


def is_part(path: Path, digest: str) -> bool:
    """Whether a part has come, and from this bundle."""
    return path.exists() and sha256([path]) == digest


def unpack_cache(pieces: Sequence[Path], places: Places) -> None:
    """Unpack compiled kernels, once: what later runs add to them stays."""
    if not pieces:
        return
    digest = sha256(pieces)
    if is_stamped(places.stamp("home"), digest):
        print("the compiled kernels are unpacked already")
        return
    extract(pieces, places.home)
    places.stamp("home").write_text(digest)
    print(f"the compiled kernels of an earlier run are unpacked in {places.home}")


def is_stamped(stamp: Path, text: str) -> bool:
    """Whether something was unpacked from just this."""
    return stamp.exists() and stamp.read_text() == text


def extract(pieces: Sequence[Path], folder: Path) -> None:
    """Unpack a tar.xz that was cut into pieces."""
    folder.mkdir(parents=True, exist_ok=True)
    with subprocess.Popen(["tar", "-C", folder, "-I", "xz -T0", "-xf", "-"], stdin=subprocess.PIPE) as tar:
        assert tar.stdin is not None
        for piece in pieces:
            with piece.open("rb") as file:
                shutil.copyfileobj(file, tar.stdin)
    if tar.returncode != 0:
        raise UnpackError(f"tar ended with {tar.returncode} on {', '.join(map(str, pieces))}: is a piece missing?")


def sha256(paths: Sequence[Path]) -> str:
    """SHA-256 of files one after another, as sha256sum prints it."""
    total = hashlib.sha256()
    for path in paths:
        total.update(path.read_bytes())
    return total.hexdigest()
