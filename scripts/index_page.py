"""The page that a package index shows: README.md with links that lead somewhere there. hatchling runs this in a build.

README.md links to files next to it, which is right in the repository and nowhere on an index. A build that knows the
address of the repository (LOCATER_REPOSITORY, which the release workflow sets) points every link to the files of its
own tag, and names the address in the metadata. Without one, links become their words, pictures are left out, and a
first line says where the pages are: no build has a link that leads nowhere.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

try:
    from hatchling.metadata.plugin.interface import MetadataHookInterface
except ImportError:  # the functions below are tested without a builder, too
    MetadataHookInterface = object

LINK = re.compile(
    r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s:]+)\)"
)  # [words](path), and no address: it would have a colon
PICTURE = re.compile(r'(?s)<img src="([^":]+)"[^>]*>(?:<br>\n)?(?:\*.*?\*\n)?')  # and the words below it
UNLINKED = "*The pages that this text names are in `docs/` of the source distribution.*\n\n"


def index_page(text: str, repository: str = "", tag: str = "") -> str:
    """README.md as an index shows it.

    >>> index_page("# X\\n\\nSee [scan](docs/scan.md#cost), [us](https://example.org).\\n", "https://host/x", "v1.0")
    '# X\\n\\nSee [scan](https://host/x/blob/v1.0/docs/scan.md#cost), [us](https://example.org).\\n'
    """
    if not repository:
        title, rest = text.split("\n\n", 1)
        return f"{title}\n\n{UNLINKED}" + LINK.sub(r"\1", PICTURE.sub("", rest))
    text = PICTURE.sub(lambda found: found[0].replace(found[1], f"{repository}/raw/{tag}/{found[1]}", 1), text)
    return LINK.sub(lambda found: f"[{found[1]}]({repository}/blob/{tag}/{found[2]})", text)


def addresses(repository: str, tag: str) -> dict[str, str]:
    """What the index lists beside the page."""
    if not repository:
        return {}
    return {
        "Source": repository,
        "Documentation": f"{repository}/tree/{tag}/docs",
        "Changelog": f"{repository}/blob/{tag}/CHANGELOG.md",
        "Issues": f"{repository}/issues",
    }


class IndexPage(MetadataHookInterface):
    """Fills in the fields of pyproject.toml that it calls dynamic."""

    def update(self, metadata: dict[str, Any]) -> None:
        repository = os.environ.get("LOCATER_REPOSITORY", "").rstrip("/")
        tag = f"v{metadata['version']}"
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": index_page(text, repository, tag)}
        metadata["urls"] = addresses(repository, tag)
