"""A hook of MkDocs: the notebooks as pages, notebooks/NAME.md.

With FEDNH_EXECUTE=1, as `make docs` sets it, every notebook is executed and its page has the output; without it a page
has text and code alone, which takes no time.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from mkdocs.structure.files import File, Files

SOURCE = Path(__file__).parents[1] / "src/fednh/cli/notebooks"


def on_files(files: Files, config: Any) -> Files:
    for path in sorted(SOURCE.glob("*.ipynb")):
        notebook = nbformat.read(path, as_version=4)
        if os.environ.get("FEDNH_EXECUTE") == "1":
            execute(notebook)
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=page(notebook, path.name)))
    return files


def execute(notebook: nbformat.NotebookNode) -> None:
    from nbclient import NotebookClient

    how = {"kernel_name": "python3", "timeout": 600, "startup_timeout": 300, "extra_arguments": ["--log-level=40"]}
    with tempfile.TemporaryDirectory() as folder:
        NotebookClient(notebook, resources={"metadata": {"path": folder}}, **how).execute()


def page(notebook: nbformat.NotebookNode, name: str) -> str:
    """Markdown: text as it is, code in fences, output below its code, pictures inside the page."""
    title, *cells = notebook.cells
    heading, _, rest = title.source.partition("\n")
    note = f"This page is a notebook: `fednh notebooks` writes `{name}` for you to run and change."
    parts = [heading, f'!!! note ""\n    {note}', rest]
    for cell in cells:
        parts.append(f"```python\n{cell.source}\n```" if cell.cell_type == "code" else cell.source)
        parts += [shown for shown in map(output, cell.get("outputs", [])) if shown]
    return "\n\n".join(parts) + "\n"


def output(found: nbformat.NotebookNode) -> str:
    if found.output_type == "stream":
        return f"```text\n{found.text.rstrip()}\n```" if found.name == "stdout" else ""
    data = found.get("data", {})
    if "image/png" in data:
        return (
            f'<img alt="The picture that the code above draws" src="data:image/png;base64,{data["image/png"].strip()}">'
        )
    return f"```text\n{data['text/plain']}\n```" if "text/plain" in data else ""
