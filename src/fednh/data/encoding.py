"""The encoding of text files: UTF-8, with or without a byte order mark, unless data.encoding names another."""

from __future__ import annotations

import codecs
from pathlib import Path

from fednh.errors import UserError

BLOCK = 1 << 20
MARKS = {codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}


def known(name: str) -> bool:
    """Whether Python has a text encoding of this name."""
    try:
        "a".encode(name)
    except (LookupError, ValueError):
        return False
    return True


def checked(path: Path, encoding: str | None) -> str:
    """The encoding to read a file by, after all of it proved to be that."""
    if encoding and not known(encoding):
        raise UserError(f"{path}: {encoding!r} is not an encoding that Python knows")
    name = codecs.lookup(encoding).name if encoding else "utf-8"
    decoder = codecs.getincrementaldecoder(name)()
    line, start = 1, b""
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            start = start or block[:4]
            try:
                text = decoder.decode(block)
            except UnicodeDecodeError as error:
                line += error.object[: error.start].count(b"\n")
                wrong = f"line {line} holds the byte 0x{error.object[error.start]:02x}"
                raise UserError(_sentence(path, encoding, wrong, start)) from error
            if encoding is None and "\0" in text:
                raise UserError(_sentence(path, encoding, "it holds zero bytes", start))
            line += text.count("\n")
    try:
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        raise UserError(_sentence(path, encoding, "it ends within a letter", start)) from error
    return "utf-8" if name == "utf-8-sig" else name


def _sentence(path: Path, encoding: str | None, wrong: str, start: bytes) -> str:
    if encoding:
        return f"{path} is not text in the encoding {encoding} ({wrong}); correct data.encoding, or save it as UTF-8"
    guess = next((name for mark, name in MARKS.items() if start.startswith(mark)), "cp1252")
    if wrong.endswith("zero bytes"):
        guess = "utf-16"
    return f"{path} is not UTF-8 text ({wrong}); save it as UTF-8, or say its encoding, such as data.encoding={guess}"
