"""What becomes of links when the site is built. The build itself, which follows every one, is `make docs`."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
_spec = importlib.util.spec_from_file_location("build_site", ROOT / "scripts/build_site.py")
assert _spec is not None
assert _spec.loader is not None
build_site = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(build_site)

WEB = "https://host/project"


@pytest.mark.parametrize(
    ("link", "shown"),
    [
        ("[a](tutorial.md)", "[a](tutorial.md)"),
        ("[a](../README.md#what-loads)", "[a](../README.md#what-loads)"),
        ("[a](../deploy)", f"[a]({WEB}/tree/main/deploy)"),
        ("[a](../kernels/ABI.md#x)", f"[a]({WEB}/blob/main/kernels/ABI.md#x)"),
        ("![a](images/page-dark.png)", "![a](images/page-dark.png)"),
        # What is nowhere stays, and fails the build.
        ("[a](nowhere.md)", "[a](nowhere.md)"),
        ("[a](../../elsewhere)", "[a](../../elsewhere)"),
        ("[a](#here)", "[a](#here)"),
        ("[a](https://a.b/c)", "[a](https://a.b/c)"),
        ("```sh\n[a](../deploy)\n```", "```sh\n[a](../deploy)\n```"),
    ],
)
def test_links_out_of_the_site_lead_to_the_repository(link: str, shown: str) -> None:
    there = set(build_site.pages())
    assert build_site.with_web_links("docs/page.md", f"before\n\n{link}\n", there, WEB) == f"before\n\n{shown}\n"


def test_the_tree_has_every_page_where_it_lies(tmp_path: Path) -> None:
    rustdoc = tmp_path / "doc"
    (rustdoc / "manylora").mkdir(parents=True)
    (rustdoc / "manylora/index.html").write_text("<p>crate")
    build_site.gather(tmp_path / "tree", rustdoc)
    for name in ("README.md", "docs/tutorial.md", "docs/images/page-dark.png", "rust/manylora/index.html"):
        assert (tmp_path / "tree" / name).is_file(), name
    assert "(../../rust/manylora/index.html)" in (tmp_path / "tree/docs/reference/rust.md").read_text()
    with pytest.raises(SystemExit, match="has no crate's pages"):
        build_site.gather(tmp_path / "other", tmp_path / "tree/docs")


@pytest.mark.parametrize(
    "asks",
    [
        '<script src="https://a.b/c.js"></script>', "<img alt=x src=//a.b/c.png>",
        '<link rel="stylesheet" href="https://a.b/c.css">', '<iframe src="http://a.b"></iframe>',
    ],
)  # fmt: skip
def test_pages_that_ask_other_servers_are_refused(asks: str, tmp_path: Path) -> None:
    (tmp_path / "good.html").write_text('<a href="https://a.b">a</a><script src="assets/x.js"></script>')
    build_site.check_offline(tmp_path)
    (tmp_path / "bad.html").write_text(f"<html>{asks}</html>")
    with pytest.raises(SystemExit, match=r"bad\.html"):
        build_site.check_offline(tmp_path)


def test_only_what_leads_nowhere_fails_the_build(tmp_path: Path) -> None:
    tree, site = tmp_path / "tree", tmp_path / "site"
    build_site.gather(tree, None)
    page = tree / "docs/plan.md"
    page.write_text(f"{page.read_text()}\n[a](nowhere.md) [b](tutorial.md#nowhere-there) [c](/docs/tutorial.md)\n")
    (tree / "docs/orphan.md").write_text("# In no menu\n")
    status, told = build_site.build(tree, site)
    assert status != 0
    for wrong in ("nowhere.md", "nowhere-there", "/docs/tutorial.md", "docs/orphan.md"):
        assert wrong in told, told
    # All the rest is as it should be.
    assert "with 4 warnings" in told, told
    build_site.check_offline(site)
    reference = (site / "docs/reference/python.html").read_text()
    assert "LoRARequest" in reference
    assert "Raises" in reference
