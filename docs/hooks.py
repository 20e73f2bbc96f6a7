"""What mkdocs does beside rendering: takes in pages that live elsewhere in the repository, and draws pictures inline.

Pages are written so that they read as well in the repository: their links name files there. Here a link to a file that
is a page of the site becomes a link to that page; any other link that leaves `docs/` is an error under `--strict`.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]

TAKEN_IN = {
    "benchmarks/README.md": "benchmarks.md",
    "predictor_service/README.md": "forecasts-measured.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
"""Files outside `docs/`, and where they are on the site."""

ORIGIN = {page: origin for origin, page in TAKEN_IN.items()}

LINK = re.compile(r"(?<=\]\()([^)\s:#]+)(?=[)#])")
DRAWING = re.compile(r"^!\[([^\]]*)\]\(([^)\s]+\.svg)\)$", re.MULTILINE)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Take in the pages that live elsewhere."""
    for origin, page in TAKEN_IN.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / origin)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links by the site's paths, and drawings as part of the page, where they have the page's colours."""
    here = page.file.src_uri
    origin = posixpath.dirname(ORIGIN.get(here, f"docs/{here}"))

    def link(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(origin, found.group(1)))
        there = TAKEN_IN.get(target, target.removeprefix("docs/") if target.startswith("docs/") else None)
        return found.group(1) if there is None else posixpath.relpath(there, posixpath.dirname(here) or ".")

    def drawing(found: re.Match[str]) -> str:
        path = ROOT / "docs" / posixpath.join(posixpath.dirname(here), found.group(2))
        return f'<figure class="drawing" role="img" aria-label="{found.group(1)}">\n{path.read_text()}</figure>'

    return LINK.sub(link, DRAWING.sub(drawing, markdown))
