"""What an attack showed, for people: a table, CSV, and a sheet of pictures as PNG and HTML."""

from __future__ import annotations

import base64
import html
import io
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fednh.attacks.canaries import Audit
from fednh.attacks.suite import Learnt, Outcome
from fednh.io.files import write_bytes, write_json
from fednh.report.sheet import DASH, Sheet, number, word
from fednh.text import csv_text, plural

SIDE = 64  # pixels of a picture, at least
ROWS = ("the samples", "reconstructed", "best public guess")
MOST = 32  # pictures in a row


def table(outcome: Outcome) -> Sheet:
    """The measures, one a row."""
    rows = [[word(name), number(value, "{:.3f}")] for name, value in outcome.measures().items()]
    return Sheet(
        "attack",
        f"What the server learns from an upload of {outcome.method}, round {outcome.round}",
        ["measure", "value"],
        rows,
        _note(outcome),
    )


def audit_table(audits: list[Audit]) -> Sheet:
    """Claims against what canaries show."""
    rows = [
        [
            word(a.what),
            word(a.canaries),
            number(a.claimed),
            number(a.one_run),
            number(a.gaussian),
            word("holds" if a.passed else "REFUTED"),
        ]
        for a in audits
    ]
    columns = ["release", "canaries", "claimed epsilon", "one-run bound", "Gaussian bound", "the claim"]
    note = ", ".join(f"{a.guesses.right} of {a.guesses.made} guesses right ({a.what})" for a in audits)
    words = f"Lower bounds of epsilon with {audits[0].confidence:.0%} confidence at delta {audits[0].delta:g}; {note}."
    return Sheet("audit", "Audit of the noise", columns, rows, words)


def _note(outcome: Outcome) -> str:
    sizes = sorted({c.samples for c in outcome.clients})
    of = f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
    words = f"{plural(len(outcome.clients), 'client')} of {of} samples; seed {outcome.settings.seed}."
    tested = next((c for c in outcome.clients if c.scores), None)
    if tested is not None:
        others = sum(len(next(iter(c.scores.values())).others) for c in outcome.clients if c.scores)
        members = sum(len(next(iter(c.scores.values())).members) for c in outcome.clients if c.scores)
        words += f" Membership: {members} members against {others} others of the same classes."
    return " ".join([words, *(f"{note[0].upper()}{note[1:]}." for note in outcome.notes)])


def to_csv(outcome: Outcome) -> str:
    """One line a measure."""
    rows = [
        (outcome.method, outcome.round, name, DASH if value is None else f"{value:.6g}")
        for name, value in outcome.measures().items()
    ]
    return csv_text([("method", "round", "measure", "value"), *rows])


def write(outcome: Outcome, folder: Path, shape: tuple[int, ...]) -> list[Path]:
    """attack.json, attack.csv, attack.html, and pictures of images as PNG."""
    write_json(folder / "attack.json", outcome.record())
    write_bytes(folder / "attack.csv", to_csv(outcome).encode())
    pictures = {}
    if len(shape) == 3:
        for client in outcome.clients:
            if client.images is not None:
                pictures[client.client] = png(client, shape)
                write_bytes(folder / f"images-{client.client:06d}.png", pictures[client.client])
    write_bytes(folder / "attack.html", _page(outcome, pictures).encode())
    return sorted(folder.glob("attack.*")) + sorted(folder.glob("images-*.png"))


def png(client: Learnt, shape: tuple[int, ...]) -> bytes:
    """Three rows of pictures: the samples, what was reconstructed, and the best public guess."""
    found = client.images
    assert found is not None
    rows = [_row(values[:MOST].numpy(), shape) for values in (found.true, found.made, found.guess)]
    out = io.BytesIO()
    Image.fromarray(np.concatenate(rows)).save(out, "PNG")
    return out.getvalue()


def _row(values: NDArray[np.float64], shape: tuple[int, ...]) -> NDArray[np.uint8]:
    channels, height, _ = shape
    zoom = max(1, SIDE // height)
    cells = []
    for value in values:
        pixels = (255 * value.reshape(shape).clip(0, 1)).astype(np.uint8).transpose(1, 2, 0)
        pixels = pixels.repeat(3, 2) if channels == 1 else pixels[..., :3]
        pixels = pixels.repeat(zoom, 0).repeat(zoom, 1)
        cells.append(np.pad(pixels, ((2, 2), (2, 2), (0, 0)), constant_values=255))
    return np.concatenate(cells, 1)


def _page(outcome: Outcome, pictures: dict[int, bytes]) -> str:
    """One file with everything in it."""
    sheet = table(outcome)
    rows = "".join(f"<tr><td>{html.escape(r[0].text)}</td><td>{html.escape(r[1].text)}</td></tr>" for r in sheet.rows)
    figures = "".join(
        _figure(client, pictures[client.client]) for client in outcome.clients if client.client in pictures
    )
    style = "body{font:16px sans-serif;max-width:60rem;margin:2rem auto}td{padding:.2rem 1rem}img{max-width:100%}"
    return (
        f"<!doctype html><meta charset=utf-8><title>{html.escape(sheet.title)}</title><style>{style}</style>"
        f"<h1>{html.escape(sheet.title)}</h1><table>{rows}</table><p>{html.escape(sheet.note)}</p>{figures}\n"
    )


def _figure(client: Learnt, picture: bytes) -> str:
    assert client.images is not None
    data = base64.b64encode(picture).decode()
    psnr = float(client.images.psnr.mean())
    words = f"{client.name}: from the top {', '.join(ROWS)}; mean PSNR {psnr:.1f} dB"
    return (
        f"<figure><img alt='' src='data:image/png;base64,{data}'><figcaption>{html.escape(words)}</figcaption></figure>"
    )
