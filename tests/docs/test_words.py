"""Docs and code are in plain American engineering English: words and names that must not come back."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]

WORDS = {  # what must not be written: what to write
    r"mend(s|ed|ing)?": "fix",
    r"beside": "next to, with, other than",
    r"anew": "again",
    r"likewise": "also, in the same way",
    r"whoever|whatever": "anyone who, what",
    r"(go|goes|going|gone|went) on": "continue",
    r"(is|are) said|says? so": "report",
    r"so (many|much)": "n, this much",
    r"in the place of": "instead of, for",
    r"in turns": "alternating",
    r"under way": "running",
    r"of (its|their) own": "separate",
    r"by (itself|themselves)": "alone, automatically, itself",
    r"told(?! apart)|asked": "name the caller, the argument, or the request",
    r"strikes?|struck": "clip, clipped",
    r"(?<=: )(it|they|there|so it) (is|are|does|do)( not| none)?(?=\.)": "if ..., where an error is raised",
}
FORBIDDEN = re.compile("|".join(rf"\b(?:{word})\b" for word in WORDS), re.I)
NAMES = {"one", "found", "own", "made", "place", "kept", "wanted"}  # name a value for what it is

# How many words and names each folder still has. Lower them as they go, to zero; never raise one.
WORDS_LEFT = {"cli": 0, "common": 0, "examples": 0, "fcdp": 0, "fuyou": 0, "scripts": 0, "tests": 0}
NAMES_LEFT = {"cli": 15, "common": 2, "examples": 0, "fcdp": 0, "fuyou": 0, "scripts": 0, "tests": 332}


def hits(text: str) -> list[str]:
    """Return the forbidden words in a text, each with some of what surrounds it."""
    text = re.sub(r"\s*\n\s*(#|//)?\s*", " ", re.sub(r"\{[^{}]*\}", "", text))  # without names in f-strings
    return [text[max(0, hit.start() - 25) : hit.end() + 25] for hit in FORBIDDEN.finditer(text)]


def prose(file: Path) -> Iterator[str]:
    """Yield a file's comments and strings; all of it, where it is not Python."""
    text = file.read_text()
    if file.suffix != ".py" or not hits(text):
        yield text
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING) and " " in token.string:  # not a name
            yield token.string


def files(folder: str) -> list[Path]:
    """Return the source files of a folder, other than this one."""
    sources = [*(ROOT / folder).rglob("*.py"), *(ROOT / folder).rglob("*.cpp")]
    return sorted(file for file in sources if file != Path(__file__))


# Second names of things that have a name in CONTRIBUTING's list of words.
DOUBLE_NAMES = re.compile(
    r"\b(_?shape: \"?ModelLayout|(device|host|ssd)_kept|kept_(bytes|layers|activations?))\b"
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_have_none_of_the_words(page: Path) -> None:
    assert hits(page.read_text()) == []


@pytest.mark.parametrize("folder", WORDS_LEFT)
def test_comments_docstrings_and_messages_have_none_of_the_words(folder: str) -> None:
    left = [
        f"{file.relative_to(ROOT)}: {hit}"
        for file in files(folder)
        for text in prose(file)
        for hit in hits(text)
    ]
    assert len(left) <= WORDS_LEFT[folder], "\n".join([f"{len(left)} hits", *left])


@pytest.mark.parametrize("folder", NAMES_LEFT)
def test_values_are_named_for_what_they_are(folder: str) -> None:
    left = [
        f"{file.relative_to(ROOT)}:{node.lineno}: {node.id}"
        for file in files(folder)
        if file.suffix == ".py"
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in NAMES
    ]
    assert len(left) <= NAMES_LEFT[folder], "\n".join([f"{len(left)} names", *left])


@pytest.mark.parametrize("folder", NAMES_LEFT)
def test_each_thing_has_a_single_name(folder: str) -> None:
    hits = [
        f"{file}: {hit.group()}" for file in files(folder) for hit in DOUBLE_NAMES.finditer(file.read_text())
    ]
    assert hits == []
