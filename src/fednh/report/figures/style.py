"""How all figures look: one palette that colour-blind readers can tell apart, one font, and how files are written.

On the web a figure must follow the page from light to dark. There it is drawn with stand-in colours for ink, muted ink
and lines, which are then replaced by the page's CSS variables; the data colours hold on both backgrounds.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter
from numpy.typing import NDArray

from fednh.errors import UserError
from fednh.io.files import write_bytes
from fednh.methods import METHODS

FORMATS = ("svg", "pdf", "png")

# A method's colour (`Method.look`) is one of Okabe and Ito's, darkened where it would fade on white, or lies between
# them. The number beside it decides dashes and marker, so that colours that are near have other dashes.
OTHERS = ("#7d5a3c", "#5b7f5f", "#6f5d8c", "#9a4a3d", "#3f7f9f")  # of methods that are not ours, by name
CYCLE = ("#0077bb", "#e08a00", "#009e73", "#cc6699", "#33a6dd", "#d55e00", "#8a63c9", "#b59f00", "#8a8f98", "#a8506e")
Floats = NDArray[np.float64]
Dashes = str | tuple[int, tuple[float, ...]]
DASHES: tuple[Dashes, ...] = ("-", (0, (5, 2)), (0, (1.2, 1.4)), (0, (5, 1.5, 1.2, 1.5)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "h", "*")
ALARM = "#d1495b"

_WEB = {"ink": "#010203", "muted": "#040506", "line": "#070809"}
_PAPER = {"ink": "#1b1e23", "muted": "#5d6673", "line": "#d5d9df"}


@contextmanager
def theme(web: bool = False) -> Iterator[None]:
    """Draw in here. `web` draws for `inline_svg`, otherwise for `save`."""
    colour = _WEB if web else _PAPER
    with mpl.rc_context(
        {
            "font.family": "sans-serif",
            "font.size": 9,
            "axes.titlesize": 9.5,
            "axes.titleweight": "bold",
            "axes.titlelocation": "left",
            "axes.labelsize": 8.5,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.edgecolor": colour["line"],
            "axes.labelcolor": colour["muted"],
            "axes.facecolor": "none",
            "axes.grid": False,
            "grid.color": colour["line"],
            "grid.linewidth": 0.6,
            "xtick.color": colour["line"],
            "ytick.color": colour["line"],
            "xtick.labelcolor": colour["muted"],
            "ytick.labelcolor": colour["muted"],
            "xtick.labelsize": 8,
            "ytick.labelsize": 8,
            "text.color": colour["ink"],
            "text.parse_math": False,  # a class may be called "$x"
            "legend.frameon": False,
            "legend.fontsize": 8,
            "lines.linewidth": 1.6,
            "figure.facecolor": "none" if web else "white",
            "savefig.facecolor": "none" if web else "white",
            "svg.fonttype": "none" if web else "path",
            "svg.hashsalt": "fednh",
            "pdf.fonttype": 42,
        }
    ):
        yield


def ink() -> str:
    return str(mpl.rcParams["text.color"])


def muted() -> str:
    return str(mpl.rcParams["axes.labelcolor"])


def line() -> str:
    return str(mpl.rcParams["grid.color"])


def shortened(name: str, most: int = 24) -> str:
    """A name that fits beside an axis; tables have the whole of it."""
    return name if len(name) <= most else f"{name[: most - 1]}…"


def shortened_apart(names: Sequence[str], most: int = 24) -> list[str]:
    """Names that fit beside an axis and stay apart: cut at their ends, else in the middle, else numbered."""
    half = most // 2 - 1
    middles = [name if len(name) <= most else f"{name[:half]}…{name[-half:]}" for name in names]
    shown = [shortened(name, most) for name in names]
    shown = [middle if shown.count(short) > 1 else short for short, middle in zip(shown, middles, strict=True)]
    return [
        f"{name[: most - 6]}… {at + 1}" if shown.count(text) > 1 and len(name) > most else text
        for at, (name, text) in enumerate(zip(names, shown, strict=True))
    ]


def sparse(names: Sequence[str], most: int, longest: int = 24) -> tuple[list[int], list[str]]:
    """The places and the names to write at an axis with room for `most`: all of them, or every n-th."""
    places = list(range(0, len(names), -(-len(names) // most)))
    return places, [shortened_apart(names, longest)[at] for at in places]


def panels(rows: int, columns: int, width: float, height: float, beside: float = 0.0) -> tuple[Figure, NDArray[Any]]:
    """A figure of rows by columns axes, each `width` by `height` inches; `beside` them there is room for names."""
    figure = Figure(figsize=(width * columns + beside, height * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    return figure, axes


def side_by_side(count: int, height: float) -> tuple[Figure, NDArray[Any]]:
    """Panels in one row; four stand two by two, where a row would shrink them on a page."""
    across = 2 if count == 4 else count
    return panels(count // across, across, 9.2 / across, height)


@dataclass(frozen=True)
class Look:
    """How one label is drawn: in lines and in dots."""

    colour: str
    dashes: Dashes
    marker: str


def looks(labels: Sequence[str], methods: Sequence[str]) -> dict[str, Look]:
    """A look for every label: its method's own; where one of several methods has several labels, the last one has it.

    The others have its colour in paler shades.
    """
    if len(set(methods)) == 1 and len(labels) > 1:
        return {label: numbered(i) for i, label in enumerate(labels)}
    by_label = {}
    for i, (label, method) in enumerate(zip(labels, methods, strict=True)):
        colour, place = _own(method)
        after = methods[i + 1 :].count(method)
        by_label[label] = _look(_shade(colour, 1 - after / methods.count(method)), place + after)
    return by_label


def numbered(place: int) -> Look:
    """The look of what is no method, or of one method's variants, by their places."""
    return _look(CYCLE[place % len(CYCLE)], place)


def _own(method: str) -> tuple[str, int]:
    """A method's colour and the number of its dashes and marker; the code of others' methods may not be here."""
    if method in METHODS and (look := METHODS[method].look):
        return look
    number = crc32(method.encode())
    return OTHERS[number % len(OTHERS)], number // len(OTHERS)


def _look(colour: str, place: int) -> Look:
    return Look(colour, DASHES[place % len(DASHES)], MARKERS[place % len(MARKERS)])


def _shade(colour: str, strength: float) -> str:
    """From a pale tint of a colour to the colour itself."""
    rgb = np.array(mpl.colors.to_rgb(colour))
    red, green, blue = (rgb + (0.72 - rgb) * (1 - strength) * 0.8).tolist()
    return mpl.colors.to_hex((red, green, blue))


def fading(*ends: str) -> ListedColormap:
    """A colour map in which zero is transparent: from nothing to one colour, or from one through nothing to another."""
    steps = np.linspace(0, 1, 128)
    parts = []
    for place, end in enumerate(ends):
        rgb = mpl.colors.to_rgb(end)
        alpha = steps[::-1] if len(ends) == 2 and place == 0 else steps
        parts.append(np.column_stack([np.tile(rgb, (len(steps), 1)), alpha]))
    return ListedColormap(np.concatenate(parts))


def grid(axes: Axes) -> None:
    axes.grid(True, axis="y")
    axes.set_axisbelow(True)
    axes.tick_params(length=0)


def log_y(axes: Axes) -> None:
    """A logarithmic vertical axis with plain labels (mathtext is off)."""
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(FuncFormatter(lambda value, _: ""))


def plot_band(axes: Axes, label: str, look: Look, x: Floats, mean: Floats, low: Floats, high: Floats) -> None:
    """A line with a band around it; few points have marks, so that nobody takes the line between them for measured."""
    marker = look.marker if len(x) < 8 else ""
    axes.plot(x, mean, color=look.colour, linestyle=look.dashes, label=label, marker=marker, markersize=4)
    axes.fill_between(x, low, high, color=look.colour, alpha=0.16, linewidth=0)


def legend_below(figure: Figure, order: Iterable[str], columns: int = 6) -> None:
    """One legend for all panels, whatever is drawn in any of them, in the given order; as many columns as have room."""
    drawn: dict[str, Any] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            drawn.setdefault(label, handle)
    labels = [label for label in order if label in drawn]
    if labels:
        handles = [drawn[label] for label in labels]
        for number in range(min(columns, len(labels)), 0, -1):
            legend = figure.legend(handles, labels, loc="outside lower center", ncols=number)
            if number == 1 or legend.get_window_extent().width <= figure.bbox.width:
                break
            legend.remove()


def save(figure: Figure, path: Path) -> None:
    """Write a figure drawn under `theme()`; the ending decides the form. The same figure gives the same bytes."""
    kind = path.suffix.lower().removeprefix(".")
    if kind not in FORMATS:
        raise UserError(f"{path}: a figure is written as .svg, .pdf or .png")
    stamp = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind, {})
    try:
        picture = io.BytesIO()
        with _no_glyph_warnings():
            figure.savefig(picture, format=kind, dpi=180, metadata=stamp)
        write_bytes(path, picture.getvalue())
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from error


def inline_svg(figure: Figure, prefix: str) -> str:
    """A figure drawn under `theme(web=True)` as an <svg> element for a page; `prefix` keeps its ids its own."""
    buffer = io.StringIO()
    with _no_glyph_warnings():
        figure.savefig(buffer, format="svg", dpi=110, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'(\sid="|href="#|url\(#)', rf"\g<1>{prefix}-", text)
    for name, stand_in in _WEB.items():
        text = text.replace(stand_in, f"var(--{name})")
    text = re.sub(r"font: [^;\"]*?([\d.]+px) [^;\"]*", r"font-size: \1; font-family: inherit", text)
    text = re.sub(r'(<svg[^>]*?) width="([\d.]+)pt" height="[\d.]+pt"', _scaled, text)
    return re.sub(r"\n\s*", "\n", text)


def _scaled(opening: re.Match[str]) -> str:
    """A page has more room than paper: let the picture grow by a quarter, and shrink as it must."""
    return f'{opening[1]} style="max-width: {1.25 * float(opening[2]):.0f}pt"'


@contextmanager
def _no_glyph_warnings() -> Iterator[None]:
    """A class name in a script that the font lacks is drawn as boxes; that is no reason to print a warning each."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        yield
