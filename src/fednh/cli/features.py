"""The command that computes features of data, once, with a frozen network."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fednh.cli.app import app
from fednh.cli.options import OFFERED, set_option, set_values
from fednh.errors import UserError
from fednh.text import plural


@app.command()
def features(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="A data set by name, or a source of your own, as in `fednh run`.",
            autocompletion=OFFERED["data"],
        ),
    ],
    model: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="efficientnet_lite0, onnx:FILE, timm:NAME or another with --weights; sentence:FOLDER for texts.",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE.npz", help="The file to write.")],
    weights: Annotated[Path | None, typer.Option(help="Of the network, a safetensors file.")] = None,
    size: Annotated[
        int | None, typer.Option(min=8, max=4096, help="Pixels a side, to which images are brought; default: 112.")
    ] = None,
    views: Annotated[
        int | None, typer.Option(min=1, help="Of a training image: itself, and others cropped and flipped; default: 1.")
    ] = None,
    text: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="Of a table: the column with the texts, for sentence:FOLDER.")
    ] = None,
    settings: Annotated[
        list[str] | None, set_option("How to read the data, e.g. data.label=kind, or another setting.")
    ] = None,
) -> None:
    """Write the features of images or texts by a frozen network to an .npz file, for `fednh run --data npz:FILE`.

    An interrupted command goes on where it stopped: what is computed is kept in a cache.
    """
    from fednh.config import load
    from fednh.data.sources.npz import write_features
    from fednh.data.sources.registry import load_texts, with_prefix
    from fednh.federated.setup import load_data, prepared
    from fednh.models.backbone import Recipe
    from fednh.models.features import with_text_features
    from fednh.models.sentences import SENTENCE, build_encoder

    if out.suffix != ".npz" or out.is_dir():
        raise UserError(f"{out} should be a file with the ending .npz")
    given: dict[str, Any] = {"features.size": size, "features.views": views}
    given["model.weights"] = None if weights is None else str(weights)
    given = {key: value for key, value in given.items() if value is not None}
    if model.startswith(SENTENCE) != (text is not None):
        raise UserError("--text COLUMN and --model sentence:FOLDER belong together: give both or neither")
    if text is not None and given:
        raise UserError(f"{min(given)} is for images; leave it out for texts")
    given |= {} if text is not None else {"model.name": model, "model.frozen": "body"}
    config = load(None, {"data.name": with_prefix(source), **given, **set_values(settings)})
    if text is None:
        raw = load_data(config)
        data = prepared(config, raw)
    else:
        encoder = build_encoder(Recipe(name=model))
        raw, texts = load_texts(config.data.name, text, config.data.model_dump())
        data = with_text_features(raw, texts, text, encoder)
    for note in (*raw.notes, *raw.warnings):
        typer.echo(f"fednh: {note}", err=True)
    write_features(out, data)
    samples = f"{plural(len(data.y_train), 'training sample')} and {plural(len(data.y_test), 'test sample')}"
    typer.echo(f"{out}: {data.shape[0]} features of {samples}; use it with --data npz:{out}")
