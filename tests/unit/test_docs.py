"""The documents: sections that the code cites are there, and links lead somewhere."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
SOURCES = ("glm53_mono", "tests", "test")

CITED = "MODEL_MATH"
"""What the code calls docs/model-math.md."""

NUMBER = r"\d+(?:\.\d+)?"


def headings(text: str) -> set[str]:
    """Numbers of the sections of a document."""
    return set(re.findall(rf"^#+ ({NUMBER})\.? ", text, re.MULTILINE))


def cited_sections(text: str) -> set[str]:
    """Sections of docs/model-math.md that a source text cites, both ends of a range among them."""
    pairs = re.findall(rf"{CITED} ({NUMBER})(?: to ({NUMBER}))?", text)
    return {number for pair in pairs for number in pair if number}


def uncited_form(text: str) -> int:
    """Mentions of the document in a source text that name no section."""
    return len(re.findall(rf"{CITED}(?! {NUMBER})", text))


def unknown_sections(texts: Iterable[str], document: str) -> set[str]:
    return {number for text in texts for number in cited_sections(text)} - headings(document)


def sources() -> list[str]:
    paths = (path for folder in SOURCES for path in sorted((ROOT / folder).rglob("*.py")))
    return [path.read_text() for path in paths if path != Path(__file__)]


def test_cited_sections_exist() -> None:
    texts = sources()
    assert set().union(*map(cited_sections, texts)) >= {"1", "2.2", "3.1", "4.3"}
    assert unknown_sections(texts, (DOCS / "model-math.md").read_text()) == set()


def test_every_citation_names_a_section() -> None:
    assert [text.splitlines()[0] for text in sources() if uncited_form(text)] == []


def test_a_section_that_does_not_exist_is_noticed() -> None:
    document = (DOCS / "model-math.md").read_text()
    assert unknown_sections([f"({CITED} 99.9).", f"{CITED} 2. A", f"{CITED} 3.3 to 3.99"], document) == {"99.9", "3.99"}
    assert uncited_form(f"see {CITED}, and {CITED} 2.2") == 1


def broken_links(path: Path) -> list[str]:
    """Relative links of a Markdown file that lead to no file, or to no heading of the file they name."""
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        file = path.parent / name if name else path
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(target)
    return broken


def anchors(path: Path) -> set[str]:
    """What GitHub makes of a file's headings."""
    titles = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_links_lead_somewhere() -> None:
    documents = [ROOT / "README.md", ROOT / ".ci" / "h200" / "README.md", *sorted(DOCS.glob("*.md"))]
    assert len(documents) >= 6
    assert {path.name: broken_links(path) for path in documents if broken_links(path)} == {}


def test_links_that_lead_nowhere_are_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A part\n[a](gone.md) [b](page.md#a-part) [c](#no-part) [d](https://example.org/x) [e](page.md)")
    assert broken_links(page) == ["gone.md", "#no-part"]
