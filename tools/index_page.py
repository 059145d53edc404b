"""The README as a package index shows it: there, a link that is relative to the repository would lead nowhere.

Hatch calls this hook for every build. FEDNH_REPOSITORY is the repository's address; the release workflow sets it. With
it, links lead to the files of this version's tag. Without it, a link becomes its text, and pictures are left out.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

ELSEWHERE = "The documents that this page names are in the source distribution, below `docs/`.\n"
LINK = re.compile(r"(?P<picture>!?)\[(?P<text>[^]]*)\]\((?!https?:|#)(?P<path>[^)\s]+)\)")


def index_page(readme: str, repository: str | None, version: str) -> str:
    """The README with absolute links, or with none where no address is known; blocks of code stay as they are."""

    def there(link: re.Match[str]) -> str:
        if repository is None:
            return "" if link["picture"] else link["text"]
        kind = "raw" if link["picture"] else "blob"
        return f"{link['picture']}[{link['text']}]({repository.rstrip('/')}/{kind}/v{version}/{link['path']})"

    parts = re.split(r"(^```.*?^```$)", readme, flags=re.MULTILINE | re.DOTALL)
    page = "".join(part if part.startswith("```") else LINK.sub(there, part) for part in parts)
    return page if repository is not None else re.sub(r"\n{3,}", "\n\n", page) + "\n" + ELSEWHERE


class IndexPage(MetadataHookInterface):
    def update(self, metadata: dict[str, Any]) -> None:
        repository = os.environ.get("FEDNH_REPOSITORY") or None
        readme = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        page = index_page(readme, repository, metadata["version"])
        metadata["readme"] = {"content-type": "text/markdown", "text": page}
        if repository is not None:
            metadata["urls"] = {"Repository": repository}
