"""A long notebook is cut into pages at its headings, and its links still lead to their targets."""

import sys
from pathlib import Path

import pytest

LINKS = "[Source](x)\n{ .links }"


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """The hook's module; it lies beside the package, where mkdocs finds it."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "site" / "hooks"))
    sys.modules.pop("parts", None)
    import parts  # type: ignore[import-not-found]

    monkeypatch.setattr(parts, "PART_BYTES", 400)
    return parts


def section(name: str, size: int, more: str = "") -> str:
    return f"## {name}\n\n{more}{'word ' * (size // 5)}\n\n"


def test_a_short_notebook_stays_one_page(parts) -> None:  # type: ignore[no-untyped-def]
    text = f"# Title\n\n{LINKS}\n\n" + section("One", 100) + section("Two", 100)
    assert [(part.name, part.text) for part in parts.parts_of("01_a", text, LINKS)] == [("01_a", text)]


def test_parts_are_even_and_linked_to_each_other(parts) -> None:  # type: ignore[no-untyped-def]
    text = f"# It's long\n\n{LINKS}\n\n" + "".join(section(name, 150) for name in ("One", "Two", "`Three`", "Four"))
    first, second = parts.parts_of("01_a", text, LINKS)
    assert (first.name, second.name) == ("01_a", "01_a-2")
    assert second.label == "Part 2: Three" and "## Two" in first.text and "## Two" not in second.text
    assert "· **Part 1** · [Part 2](01_a-2.md)\n{ .links }" in first.text
    assert "goes on: [Part 2: Three](01_a-2.md)" in first.text
    assert "title: 'It''s long, part 2'" in second.text and "[Source](x) · [Part 1](01_a.md)" in second.text


def test_a_heading_in_code_is_no_place_to_cut(parts) -> None:  # type: ignore[no-untyped-def]
    text = section("One", 10, "````\n```\n## not a heading\n```\n````\n") + section("Two", 10)
    assert [piece.partition("\n")[0] for piece in parts.sections(text)] == ["## One", "## Two"]


def test_links_follow_their_target_to_another_part(parts) -> None:  # type: ignore[no-untyped-def]
    far = section("Far away", 300, '<div id="helios.kv.Pool"></div>\n')
    text = f"# T\n\n{LINKS}\n\n" + section("Near", 150, "[a](#far-away) [b](#helios.kv.Pool) [c](#near)\n") + far
    first, _ = parts.parts_of("01_a", text, LINKS)
    assert "[a](01_a-2.md#far-away) [b](01_a-2.md#helios.kv.Pool) [c](#near)" in first.text
