"""A trained model that predicts: what `fednh.load_model` gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fednh.data import scaling
from fednh.data.dataset import Inputs
from fednh.data.sources.folder import refuse
from fednh.errors import UserError
from fednh.federated import similarity as novelty
from fednh.inference import inputs
from fednh.io.files import path_of
from fednh.methods import Method
from fednh.models import Net
from fednh.models.backbone import Backbone, build_backbone
from fednh.models.features import compute
from fednh.models.sentences import SENTENCE, SentenceEncoder, build_encoder
from fednh.runs.layout import MODEL, RunLayout
from fednh.runs.model_file import Card, architecture, read_model
from fednh.runs.run_folder import find_client, read_names
from fednh.text import html_table, one_line, plural, some
from fednh.tree import Tree

Floats = NDArray[np.float32]


class Scores(NamedTuple):
    """A model's outputs for samples."""

    logits: Floats  # (N, C)
    probabilities: Floats  # (N, C), the softmax of the logits
    similarity: Floats | None  # (N,), the cosine to the nearest prototype, where the method has them


def joined(parts: Sequence[Scores]) -> Scores:
    """The scores of several batches as one."""
    near = [part.similarity for part in parts if part.similarity is not None]
    logits, probabilities = (np.concatenate([part[k] for part in parts]) for k in (0, 1))
    return Scores(logits, probabilities, np.concatenate(near) if near else None)


@dataclass(frozen=True)
class Model:
    """A trained model, complete: tensors, network, method, class names and preprocessing.

    `x` below is an array or tensor of uint8 images (N, H, W) or (N, H, W, C), or of vectors (N, F), with values as in
    the training data; PIL images; paths of what `fednh predict` takes, files and folders; one or a list. Images of
    another size are brought to the model's as in training. A model of a table takes a data frame (pandas, Polars,
    Arrow), a dict a row, one or a list, or a dict of columns. The results are those of `fednh predict`, to the bit.
    """

    params: Tree
    card: Card
    net: Net
    method: Method
    backbone: Backbone | SentenceEncoder | None = None  # the frozen network whose features the net takes

    def __repr__(self) -> str:
        """One line: whose model it is, what it takes and which classes it knows."""
        return f"<Model: {', '.join(self._facts().values())}>"

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return html_table(self._facts())

    def _facts(self) -> dict[str, str]:
        card = self.card
        owner = card.site or (None if card.client is None else f"client {card.client}")
        kind = "global" if owner is None and "personalised_on" not in card.trained_on else "personal"
        form = "images" if inputs.is_image(card) else "vectors"
        numbers, shape = sum(value.numel() for value in self.params.values()), "x".join(map(str, card.shape))
        return {
            "model": f"{kind} model of {card.method.get('name')}{'' if owner is None else f' for {owner}'}",
            "network": f"{card.model.name} of {plural(numbers, 'number')}",
            "takes": "texts" if inputs.is_text(card) else f"{form} of {shape}",
            "classes": f"{plural(len(self.classes), 'class', 'classes')} ({some(self.classes)})",
            "trained on": one_line(str(card.trained_on.get("data", "unknown data")), 100),
        }

    @property
    def classes(self) -> tuple[str, ...]:
        """The class names, in the order of the columns of `predict_proba`."""
        return self.card.classes

    @property
    def info(self) -> dict[str, Any]:
        """Everything that the model file says about itself: method, architecture, classes, preprocessing, origin."""
        return self.card.model_dump(mode="json", exclude_none=True)

    def predict(self, x: Any) -> NDArray[np.str_]:  # (N,)
        """The name of the most probable class of every input."""
        names: NDArray[np.str_] = np.array(self.classes)[self.predict_proba(x).argmax(1)]
        return names

    def predict_proba(self, x: Any) -> Floats:  # (N, C)
        """The probability of every class for every input."""
        return self._scores_of(x).probabilities

    def similarity(self, x: Any) -> Floats:  # (N,)
        """The cosine of every input to its nearest class prototype: low for what looks like no known class."""
        cosines = self._scores_of(x).similarity
        if cosines is None:
            raise UserError(self.no_similarity)
        return cosines

    def _scores_of(self, x: Any) -> Scores:
        """Everything about inputs; files are read and computed in the batches in which `fednh predict` does it."""
        paths = None if inputs.are_texts(x, self.card) else inputs.paths_of(x)
        if paths is None:
            return self.scores(inputs.samples(x, self.card))
        parts = [scores for _, scores in self.batches(paths, refuse)]
        return joined(parts) if parts else self.scores(inputs.samples([], self.card))

    @property
    def no_similarity(self) -> str:
        name = self.card.method.get("name")
        return f"a model of {name} has no cosines to prototypes, so what it does not know cannot be told by them"

    def threshold(self, level: str | float) -> float:
        """The similarity below which an input counts as unknown: a number, "auto" (5%), or a stored quantile, "1%"."""
        if not self.method.cosine:
            raise UserError(self.no_similarity)
        level = str(level)
        try:
            if level != "auto" and not level.endswith("%"):
                return float(level)
            share = 0.05 if level == "auto" else float(level[:-1]) / 100
        except ValueError:
            raise UserError(f"reject = {level!r} should be a cosine such as 0.6, auto, 1% or 5%") from None
        stored = (self.card.novelty or {}).get("quantiles", {})
        if f"{share:g}" not in stored:
            known = ", ".join(f"{100 * float(q):g}%" for q in stored) or "none"
            raise UserError(f"reject = {level}: this quantile is not stored in the model ({known}); give a cosine")
        return float(stored[f"{share:g}"])

    @torch.no_grad()
    def scores(self, samples: Inputs, tell: Callable[[int, int], None] | None = None) -> Scores:
        """Everything about samples as `inputs` makes them; `tell` hears after each batch how many of all are done."""
        parts = [torch.zeros(0, len(self.classes))]
        for at in range(0, len(samples), inputs.BATCH):
            part = samples[at : at + inputs.BATCH]
            if self.backbone is not None:
                vectors = torch.from_numpy(_features_of(part, self.backbone))
                parts.append(self.method.scores(self.net, self.params, vectors))
            else:
                parts.append(self.logits(torch.from_numpy(part), self.params, self.normalisation))
            if tell is not None:
                tell(at + len(part), len(samples))
        logits = torch.cat(parts)
        near = novelty.similarity(self.method, self.params, logits)
        return Scores(logits.numpy(), logits.softmax(1).numpy(), None if near is None else near.numpy())

    def logits(self, stored: Tensor, params: Tree, how: scaling.Constants) -> Tensor:  # (B, ...) -> (B, C)
        """From samples as they are stored to class scores: preprocessing, network, method."""
        if isinstance(self.backbone, Backbone):
            return self.method.scores(self.net, params, self.backbone(stored))
        x = scaling.floats(scaling.filled(stored, how.centre), how.gain, how.shift)
        return self.method.scores(self.net, params, x)

    @cached_property
    def normalisation(self) -> scaling.Constants:
        """How stored values reach the network, as in training."""
        how = self.card.preprocessing
        return scaling.constants(how.scale, how.mean, how.std)

    def batches(
        self, paths: list[Path], failed: Any, form: Mapping[str, Any] | None = None
    ) -> Iterator[tuple[inputs.Batch, Scores]]:
        """Predictions for files and folders, a batch at a time; `failed` is told what could not be read."""
        for batch in inputs.stream(paths, self.card, failed, form):
            yield batch, self.scores(batch.x)


def _features_of(samples: Inputs, backbone: Backbone | SentenceEncoder) -> Floats:  # (N, D)
    """What a frozen network makes of images or texts; features are used as they are."""
    if samples.ndim == 2:
        return samples.astype(np.float32, copy=False)
    if isinstance(backbone, SentenceEncoder):
        return backbone(samples.tolist())
    return compute(samples, backbone)


def load_model(path: str | Path, client: int | str | None = None, weights: str | Path | None = None) -> Model:
    """The model in a file; of a run folder the global one, or with `client` that client's personal one.

    A client is meant by its number, or by the name of its site; text that is both is taken for the name. `weights` is
    the file with the weights of a frozen body, where they are not in a place that the model knows.
    """
    file = find_model(path_of(path, "a model file or a run folder"), client)
    params, card = read_model(file)
    try:
        net, method = architecture(card)
        model = Model(params, card, net, method, backbone_for(card, file, weights))
        blank = np.zeros((1, *_stored(card.shape)), np.float32)
        tried = model.scores(blank.astype(np.uint8) if inputs.is_image(card) else blank)
        if tried.logits.shape != (1, len(card.classes)):
            raise ValueError(f"it tells {tried.logits.shape[-1]} classes apart, but names {len(card.classes)}")
    except UserError as error:
        raise UserError(f"{file}: {error}") from error
    except (KeyError, RuntimeError, ValueError, TypeError, AttributeError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise UserError(f"{file}: its tensors do not fit the network that its card describes: {reason}") from error
    return model


def backbone_for(
    card: Card, file: Path | None = None, weights: str | Path | None = None
) -> Backbone | SentenceEncoder | None:
    """The frozen body that a model's card names, None where it names none; `file` is the model's."""
    if card.features is None:
        if weights is not None:
            raise UserError(f"weights = {weights}: the model has no frozen body, so it needs none; leave it out")
        return None
    near, given = None if file is None else file.absolute().parent, None if weights is None else Path(weights)
    if card.features.name.startswith(SENTENCE):
        return build_encoder(card.features, given)
    return build_backbone(card.features, len(card.classes), given, near)


def find_model(path: Path, wanted: int | str | None = None) -> Path:
    """The path of the model file."""
    if not path.is_dir():
        if wanted is not None:
            raise UserError(f"client = {wanted} picks a model of a run folder, but {path} is not a folder")
        if not path.exists():
            raise UserError(f"{path} does not exist; give a model file or a run folder")
        return path
    single, run = path / MODEL, RunLayout(path)
    if wanted is None and single.exists():
        return single
    if wanted is None and run.global_model.exists():
        return run.global_model
    if wanted is None and (several := [shared.global_model for shared in run.shared_models()]) and several[0].exists():
        files = some([str(file) for file in several], len(several))
        raise UserError(
            f"{path} has a global model for each network: give one of {files}, or pick a client's by client = ..."
        )
    personal = run.clients_with_models()
    if not personal:
        raise UserError(f"{path} holds no models; give a model file or the folder of a finished run")
    known, names = _listed(sorted(personal)), read_names(path)
    if wanted is None:
        raise UserError(f"{path} has no global model (its method makes none); pick a client's by client = ..., {known}")
    client = find_client(names, wanted, path, personal)
    if client in personal:
        return personal[client]
    who = f"site {names[client]} (client {client})" if client in names else f"client {client}"
    raise UserError(f"{path} has no personal model of {who}; there are those of {known}")


def _listed(numbers: list[int], most: int = 20) -> str:
    """Sorted numbers as text, with ranges: 0 to 3, 5 and 7."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and ranges[-1][-1] == number - 1:
            ranges[-1].append(number)
        else:
            ranges.append([number])
    words = [word for r in ranges for word in ([f"{r[0]} to {r[-1]}"] if len(r) > 2 else [str(number) for number in r])]
    last = "more" if len(words) > most else words.pop()
    return " and ".join([", ".join(words[:most]), last] if words else [last])


def _stored(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a sample as it is stored: channels last."""
    return (*shape[1:], shape[0]) if len(shape) == 3 else shape
