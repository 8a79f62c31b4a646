"""Check the built documentation site: `python -m tests.project.site FOLDER`, after `mkdocs build --strict -d FOLDER`.

mkdocs checks the links of its Markdown pages. This checks the pages as they are served, with the links that the theme
and the API reference add: every internal link has a page and an anchor, nothing is loaded from the network, and the
search finds every public name.
"""

from __future__ import annotations

import argparse
import functools
import html.parser
import json
import pathlib
import re
import urllib.parse
from collections.abc import Callable, Iterator

ROOT = pathlib.Path(__file__).parents[2]
_LOADED = {"img": "src", "script": "src", "source": "src", "iframe": "src"}


class _Page(html.parser.HTMLParser):
    """The anchors, the links and the loaded files of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value for name, value in attrs if value}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        elif tag == "link" and "href" in values and values.get("rel") not in ("canonical", "prev", "next"):
            self.loaded.append(values["href"])
        elif tag in _LOADED and _LOADED[tag] in values:
            self.loaded.append(values[_LOADED[tag]])


def find_problems(site: pathlib.Path) -> list[str]:
    """Return a line for each internal link without a target, and for each file that is loaded from the network."""
    read = functools.cache(lambda path: _Page(path.read_text(encoding="utf-8")))
    return [
        f"{page.relative_to(site)}: {problem}"
        for page in sorted(site.rglob("*.html"))
        if page.name != "404.html"  # its links begin with the address of the site
        for problem in _find_page_problems(site, page, read)
    ]


def _find_page_problems(site: pathlib.Path, page: pathlib.Path, read: Callable[[pathlib.Path], _Page]) -> Iterator[str]:
    for target in read(page).loaded:
        if re.match(r"(https?:)?//", target):
            yield f"{target} is loaded from the network"
    for target in (*read(page).links, *read(page).loaded):
        parts = urllib.parse.urlsplit(target)
        if parts.scheme or parts.netloc:
            continue
        file = (page.parent / urllib.parse.unquote(parts.path)).resolve() if parts.path else page
        file = file / "index.html" if file.is_dir() else file
        anchor = urllib.parse.unquote(parts.fragment)
        if not file.is_relative_to(site.resolve()) or not file.is_file():
            yield f"{target} has no page"
        elif anchor and anchor not in read(file).anchors:
            yield f"{target} has no anchor"


def find_unsearchable(site: pathlib.Path) -> list[str]:
    """Return the public names of the API reference that the index of the search does not have."""
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    found = {entry["location"].partition("#")[2] for entry in index["docs"]}
    pages = sorted((ROOT / "docs" / "api").glob("*.md"))
    names = [name for page in pages for name in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)]
    return [name for name in names if name not in found]


def main(arguments: list[str] | None = None) -> int:
    """Print the problems of a site. Return 1 if there is one, else 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("site", type=pathlib.Path, help="the folder with the built site")
    site = parser.parse_args(arguments).site.resolve()
    problems = find_problems(site) + [f"the search does not find {name}" for name in find_unsearchable(site)]
    print("\n".join(problems) or f"{len(list(site.rglob('*.html')))} pages: all internal links and anchors resolve")
    return int(bool(problems))


if __name__ == "__main__":
    raise SystemExit(main())
