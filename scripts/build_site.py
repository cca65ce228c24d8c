"""Build the documentation site: the repository's pages as they are, the Rust reference, every link followed.

The pages are written for a repository's browser: they link to files and folders of it by relative paths. So the site is
built from a tree of copies in which each page lies where it lies here. What a page links to and the site does not have
(a folder, a file of results) becomes a link to the repository on the web. `mkdocs build --strict` then follows all
others, anchors included.
"""

from __future__ import annotations

import argparse
import os
import posixpath
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Pages of the top level that are part of the site.
TOP = ["README.md", "ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"]
RUST = "rust"
LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")
FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
# What a browser would fetch by itself when it opens a page.
FETCHED = re.compile(r"<(?:script|img|iframe|source|link)\b[^>]*?\b(?:src|href)=[\"']?((?:https?:)?//[^\"'\s>]+)")


def repository() -> str:
    """Return the address of the repository on the web."""
    manifest = (ROOT / "Cargo.toml").read_text(encoding="utf-8")
    found = re.search(r'^repository = "([^"]+)"$', manifest, re.MULTILINE)
    if found is None:
        raise SystemExit("Cargo.toml names no repository")
    return found[1]


def pages() -> list[str]:
    """Return the paths of all that the site is made of, from the top of the repository."""
    docs = (path for path in (ROOT / "docs").rglob("*") if path.is_file())
    return TOP + sorted(path.relative_to(ROOT).as_posix() for path in docs)


def with_web_links(page: str, text: str, there: set[str], web: str) -> str:
    """Return the text of a page, with links to what the site does not have leading to the web.

    A link to what the repository does not have either stays as it is, so that the build fails.
    """

    def web_link(match: re.Match[str]) -> str:
        opened, target, closed = match.groups()
        if re.match(r"[a-z]+:", target):
            return match[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(page), target))
        if path in there or path.startswith("..") or not (ROOT / path).exists():
            return match[0]
        kind = "tree" if (ROOT / path).is_dir() else "blob"
        return f"{opened}{web}/{kind}/main/{path}{closed}"

    parts = FENCE.split(text)
    return "".join(part if index % 2 else LINK.sub(web_link, part) for index, part in enumerate(parts))


def rust_pages(rustdoc: Path, tree: Path) -> str:
    """Copy the Rust reference into the tree; return the list of its crates as Markdown."""
    crates = sorted(path.parent.name for path in rustdoc.glob("manylora*/index.html"))
    crates = [crate for crate in crates if crate != "manylora_benches"]
    if not crates:
        raise SystemExit(f"`{rustdoc}` has no crate's pages; run `cargo doc --workspace --no-deps` first")
    shutil.copytree(rustdoc, tree / RUST, ignore=shutil.ignore_patterns("manylora_benches", "_core", ".*", "*.md"))
    return "\n" + "".join(f"- [`{crate}`](../../{RUST}/{crate}/index.html)\n" for crate in crates)


def gather(tree: Path, rustdoc: Path | None) -> None:
    """Fill the tree that the site is built from."""
    shutil.rmtree(tree, ignore_errors=True)
    there, web = set(pages()), repository()
    for page in there:
        target = tree / page
        target.parent.mkdir(parents=True, exist_ok=True)
        if page.endswith(".md"):
            text = with_web_links(page, (ROOT / page).read_text(encoding="utf-8"), there, web)
            target.write_text(text, encoding="utf-8")
        else:
            shutil.copyfile(ROOT / page, target)
    if rustdoc is not None:
        crates = rust_pages(rustdoc, tree)
        with (tree / "docs/reference/rust.md").open("a", encoding="utf-8") as file:
            file.write(crates)


def check_offline(site: Path) -> None:
    """End with an error if a page of the site would ask another server for anything."""
    found = [
        f"{path.relative_to(site)}: {address}"
        for path in sorted(site.rglob("*.html"))
        if RUST not in path.relative_to(site).parts
        for address in FETCHED.findall(path.read_text(encoding="utf-8"))
    ]
    if found:
        raise SystemExit("pages of the site ask other servers:\n" + "\n".join(found))


def build(tree: Path, site: Path) -> tuple[int, str]:
    """Make the site of a tree; return mkdocs' status and what it says. Any warning is an error."""
    # NO_MKDOCS_2_WARNING: an advertisement on every build.
    environment = os.environ | {
        "MANYLORA_SITE": str(site),
        "MANYLORA_SITE_PAGES": str(tree),
        "NO_MKDOCS_2_WARNING": "1",
    }
    # Not `--quiet`: warnings that are not told are not counted either.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", str(ROOT / "mkdocs.yml")]
    told = subprocess.run(
        command, env=environment, check=False, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    return told.returncode, told.stdout


def main() -> None:
    """Build the site."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the site; what is in it goes")
    parser.add_argument(
        "--rustdoc", type=Path, help="what `cargo doc` has made; without it the site has no Rust reference"
    )
    flags = parser.parse_args()
    site = flags.out.resolve()
    tree = site.with_name(site.name + "-pages")
    gather(tree, flags.rustdoc)
    status, told = build(tree, site)
    if status:
        raise SystemExit(told)
    check_offline(site)
    print(f"the site is in {site}: open index.html")


if __name__ == "__main__":
    main()
