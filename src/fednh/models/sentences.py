"""Sentence encoders: frozen networks that turn texts into feature vectors (`sentence:FOLDER`, extra `text`).

The folder is one that sentence-transformers has saved: the network, its tokenizer, and how tokens are pooled. Nothing
is downloaded. Each text is encoded by itself, so that its features do not depend on the length of others.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fednh import extras
from fednh.errors import ConfigError
from fednh.io.files import expanded
from fednh.io.files import sha256 as checksum
from fednh.machine import one_thread
from fednh.models.backbone import Recipe

SENTENCE = "sentence:"
READ = (".json", ".txt", ".safetensors", ".bin", ".model")  # endings of the files that an encoder consists of


class SentenceEncoder:
    """A frozen encoder with its recipe: texts -> features (N, D)."""

    def __init__(self, recipe: Recipe, folder: Path):
        extras.need("text", f"model.name = {recipe.name!r}")
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        from sentence_transformers import SentenceTransformer
        from transformers.utils import logging

        logging.disable_progress_bar()
        try:
            self.network = SentenceTransformer(str(folder), device="cpu", local_files_only=True)
        except Exception as error:  # whatever the library raises for a folder of another kind
            reason = str(error).strip().partition("\n")[0]
            raise ConfigError(f"{folder} cannot be read as a sentence encoder: {reason}") from error
        dim = len(self(["a"])[0])
        known = {"name": SENTENCE + folder.name, "sha256": folder_checksum(folder), "dim": dim, "file": str(folder)}
        self.recipe = recipe.model_copy(update=known)

    def __call__(self, texts: Sequence[str]) -> NDArray[np.float32]:  # (N, D)
        with one_thread():
            made = self.network.encode(list(texts), batch_size=1, show_progress_bar=False, convert_to_numpy=True)
        return np.asarray(made, np.float32)


def build_encoder(recipe: Recipe, given: Path | None = None) -> SentenceEncoder:
    """The encoder of a recipe, in the folder given or where the recipe says; another one is refused."""
    folder = given or expanded(recipe.file or recipe.name.removeprefix(SENTENCE))
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder; say with weights where the sentence encoder is")
    if recipe.sha256 and folder_checksum(folder) != recipe.sha256:
        raise ConfigError(f"{folder} does not hold the agreed sentence encoder: its checksum is {recipe.sha256}")
    return SentenceEncoder(recipe, folder.absolute())


def folder_checksum(folder: Path) -> str:
    """SHA-256 of the names and contents of an encoder's files."""
    files = sorted(file for file in folder.rglob("*") if file.suffix in READ and file.is_file())
    lines = [f"{file.relative_to(folder).as_posix()} {checksum(file)}\n" for file in files]
    return sha256("".join(lines).encode()).hexdigest()
