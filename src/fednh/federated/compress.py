"""Smaller uploads (`federation.compress`): what a client sends, and what it still owes.

    client:  sent, unsent = pack(upload - received + unsent of the last round)       server:  received + unpack(sent)

What the server sent, and the client trained, travels as the step from the one to the other. `int8` rounds every row of
it (an output channel) to 255 levels; `top-k` sends the share of each tensor's numbers with the largest magnitudes. What
is lost stays with the client and is added to its next step, so that it is sent later (error feedback): the sum of all
that was sent differs from the sum of all steps by the newest remainder alone.

Rows by class, such as prototypes, are no steps: `int8` rounds them to 127 levels of either sign and keeps each row's
length, so that a row of zeros stays one and a mean of unit vectors is not longer than 1; nothing of them is owed. All
other parts have a meaning to the last bit (marks, sums over samples, weights, records, statistics) and travel whole.
The packed tensors are then compressed without loss. `lossless` is that alone: the bits in which the upload differs from
what was received, byte by byte, so that the bytes of exponents are neighbours. Nothing here draws a random number: the
same upload, received state and remainder give the same bytes wherever a client is computed.

Error feedback: Seide et al., "1-Bit Stochastic Gradient Descent", Interspeech 2014; Karimireddy et al., "Error Feedback
Fixes SignSGD", ICML 2019. The largest entries: Stich et al., "Sparsified SGD with Memory", NeurIPS 2018.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import safetensors.numpy
import torch
from torch import Tensor

from fednh.config.schema import FederationConfig
from fednh.errors import ConfigError
from fednh.federated.checks import TensorSpecs, form_of
from fednh.federated.client import UNSENT, ClientResult
from fednh.methods.base import Method, UploadSpec
from fednh.tree import Tree, canonical, finite, is_statistic, prefix, strip_prefix

LEVELS = 127  # of either sign
EFFORT = 6  # of the lossless compression, from 1 to 9
Way = Literal["bits", "step", "rows", "whole"]


@dataclass(frozen=True)
class Compression:
    """How the uploads of a run are compressed."""

    kind: Literal["lossless", "int8", "top-k"]
    share: float  # of a tensor's numbers, for top-k

    @classmethod
    def of(cls, federation: FederationConfig) -> Compression | None:
        """What a config asks for; None: uploads travel as they are."""
        return None if federation.compress == "none" else cls(federation.compress, federation.compress_share)

    # --- forms -------------------------------------------------------------------------------------------------

    def ways(self, form: TensorSpecs, received: TensorSpecs, spec: UploadSpec) -> dict[str, Way]:
        """How each tensor of an upload travels."""
        return {name: self._way(name, form, received, spec) for name in sorted(form)}

    def _way(self, name: str, form: TensorSpecs, received: TensorSpecs, spec: UploadSpec) -> Way:
        shape, dtype = form[name]
        if dtype != torch.float32:
            return "whole"
        if self.kind == "lossless":
            return "bits"
        exact = {*spec.marks, *spec.summed, *spec.recorded, *spec.untrained, spec.weight}
        parts = self._parts(shape, "step").values()
        if name in exact or is_statistic(name) or sum(_bytes(*each) for each in parts) >= _bytes(shape, dtype):
            return "whole"
        if name in spec.by_class:
            return "rows" if self.kind == "int8" and len(shape) > 1 else "whole"
        return "step" if received.get(name) == form[name] else "whole"

    def _parts(self, shape: tuple[int, ...], way: Way) -> TensorSpecs:
        """The tensors in whose place one of this shape travels, unless it travels whole."""
        size = math.prod(shape)
        if way == "bits":
            return {"planes": ((4, size), torch.uint8)}
        if self.kind == "int8":
            return {"codes": (shape, torch.int8), "scales": ((_rows(shape),), torch.float32)}
        return {"mask": ((-(-size // 8),), torch.uint8), "planes": ((4, self._count(size)), torch.uint8)}

    def _count(self, size: int) -> int:
        return max(1, math.ceil(self.share * size - 1e-9)) if size else 0

    def packed_form(self, form: TensorSpecs, received: TensorSpecs, spec: UploadSpec) -> TensorSpecs:
        """What an upload of this form looks like on its way."""
        packed: TensorSpecs = {}
        for name, way in self.ways(form, received, spec).items():
            parts = {"whole": form[name]} if way == "whole" else self._parts(form[name][0], way)
            packed |= {f"{part}.{name}": each for part, each in parts.items()}
        return packed

    # --- trees -------------------------------------------------------------------------------------------------

    def pack(self, upload: Tree, received: Tree, unsent: Tree, spec: UploadSpec) -> tuple[Tree, Tree]:
        """What travels, and what of the step stays with the client until its next round.

        A number that is not finite is sent as zero; the server refuses such an upload in any case.
        """
        packed: Tree = {}
        left: Tree = {}
        for name, way in self.ways(form_of(upload), form_of(received), spec).items():
            value = upload[name].detach().contiguous()
            if way == "bits":
                parts = {"planes": planes(words(value) ^ _reference(received, name, value))}
            elif way == "step":
                step = value - received[name].contiguous()
                step = torch.nan_to_num(step + unsent[name] if name in unsent else step, 0.0, 0.0, 0.0)
                parts = self._coded(step)
                left[name] = step - self._decoded(parts, tuple(step.shape))
            elif way == "rows":
                parts = _coded_rows(torch.nan_to_num(value, 0.0, 0.0, 0.0))
            else:
                parts = {"whole": value}
            packed |= {f"{part}.{name}": each for part, each in parts.items()}
        return packed, left

    def unpack(self, packed: Tree, form: TensorSpecs, received: Tree, spec: UploadSpec) -> Tree:
        """The upload that a packed one of the right form stands for; ValueError if its content is none."""
        upload: Tree = {}
        for name, way in self.ways(form, form_of(received), spec).items():
            shape = form[name][0]
            if way == "whole":
                upload[name] = packed[f"whole.{name}"]
                continue
            parts = {part: packed[f"{part}.{name}"] for part in self._parts(shape, way)}
            try:
                if way == "bits":
                    like = parts["planes"].new_zeros(shape, dtype=torch.float32)
                    differing = unplanes(parts["planes"]) ^ _reference(received, name, like)
                    upload[name] = differing.view(torch.float32).reshape(shape)
                    continue
                decoded = self._decoded(parts, shape)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
            upload[name] = decoded if way == "rows" else received[name].contiguous() + decoded
        return canonical(upload)

    def applied(self, result: ClientResult, kept: Tree, received: Tree, spec: UploadSpec) -> ClientResult:
        """A simulated client's result as a server would have it: what arrives, its bytes, and what the client keeps."""
        if result.upload is None or result.upload_finite is False:
            return result
        packed, left = self.pack(result.upload, received, strip_prefix(kept, UNSENT), spec)
        upload = self.unpack(packed, form_of(result.upload), received, spec)
        keep = {**result.keep, **prefix(UNSENT, left)}
        return replace(result, keep=keep, upload=upload, upload_finite=finite(upload), bytes_up=len(written(packed)))

    def _coded(self, step: Tensor) -> Tree:
        if self.kind == "int8":
            scales = _by_row(step).abs().amax(1) / LEVELS
            return {"codes": _codes(step, scales), "scales": scales}
        flat = step.reshape(-1)
        chosen = largest(flat, self._count(len(flat)))
        return {"mask": packed_bits(chosen), "planes": planes(words(flat[chosen]))}

    def _decoded(self, parts: Mapping[str, Tensor], shape: tuple[int, ...]) -> Tensor:
        if self.kind == "int8":
            codes, scales = parts["codes"], parts["scales"]
            if not bool((torch.isfinite(scales) & (scales >= 0)).all()):
                raise ValueError("a scale is negative or not finite")
            return (_by_row(codes).to(torch.float32) * scales[:, None]).reshape(shape)
        size, values = math.prod(shape), unplanes(parts["planes"]).view(torch.float32)
        chosen = unpacked_bits(parts["mask"], size)
        if int(chosen.sum()) != len(values):
            raise ValueError(f"it marks {int(chosen.sum())} numbers and sends {len(values)}")
        flat = values.new_zeros(size)
        flat[chosen] = values
        return flat.reshape(shape)


def check(compression: Compression, method: Method, name: str, form: TensorSpecs, received: TensorSpecs) -> None:
    """Refuse a method of whose upload nothing can be compressed."""
    if set(compression.ways(form, received, method.upload).values()) <= {"whole"}:
        raise ConfigError(
            f"federation.compress = {compression.kind!r} is of trained parameters that the server has sent, and method "
            f"{name} uploads none; leave it at 'none'"
        )


# --- bytes ----------------------------------------------------------------------------------------------------------


def written(packed: Tree) -> bytes:
    """A packed upload as it travels."""
    plain = {name: value.detach().cpu().contiguous().numpy() for name, value in packed.items()}
    return zlib.compress(safetensors.numpy.save(plain), EFFORT)


def read(data: bytes, most: int) -> bytes:
    """The safetensors bytes of a packed upload; ValueError if they are more than `most`, or broken."""
    reader = zlib.decompressobj()
    try:
        plain = reader.decompress(data, most + 1)
    except zlib.error as error:
        raise ValueError(f"it cannot be decompressed: {error}") from None
    if len(plain) > most:
        raise ValueError(f"decompressed it has more than the {most} bytes that are expected")
    if not reader.eof or reader.unused_data:
        raise ValueError("it cannot be decompressed: it does not end where its content does")
    return plain


# --- numbers --------------------------------------------------------------------------------------------------------


def _bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return math.prod(shape) * dtype.itemsize


def _rows(shape: tuple[int, ...]) -> int:
    """How many scales a tensor has: one for each output of a layer, one for a vector."""
    return shape[0] if len(shape) > 1 else 1


def _by_row(value: Tensor) -> Tensor:
    return value.reshape(_rows(tuple(value.shape)), -1)


def _codes(value: Tensor, scales: Tensor) -> Tensor:
    by = torch.where(scales > 0, scales, 1.0)[:, None]
    return (_by_row(value) / by).round().clamp(-LEVELS, LEVELS).to(torch.int8).reshape(value.shape)


def _coded_rows(value: Tensor) -> Tree:
    """Rows with scales that keep every row's length."""
    rows = _by_row(value)
    codes = _codes(value, rows.abs().amax(1) / LEVELS)
    length = torch.linalg.vector_norm(_by_row(codes).to(torch.float32), dim=1)
    return {"codes": codes, "scales": torch.linalg.vector_norm(rows, dim=1) / length.clamp(min=1)}


def largest(flat: Tensor, count: int) -> Tensor:  # (n,) -> (n,)
    """Which numbers are the `count` of the largest magnitude; of equal ones the first."""
    size = flat.abs()
    chosen = torch.zeros(len(flat), dtype=torch.bool, device=flat.device)
    if count:
        least = size.topk(count).values[-1]
        chosen = size > least
        ties = (size == least).nonzero().flatten()
        chosen[ties[: count - int(chosen.sum())]] = True
    return chosen


def words(value: Tensor) -> Tensor:  # (...) -> (n,)
    """The bits of 32-bit numbers, as whole numbers."""
    return value.contiguous().reshape(-1).view(torch.int32)


def planes(value: Tensor) -> Tensor:  # (n,) -> (4, n)
    """The bytes of 32-bit words, all first bytes first: neighbours are alike, and compress better."""
    return value.view(torch.int32).view(torch.uint8).reshape(-1, 4).T.contiguous()


def unplanes(value: Tensor) -> Tensor:  # (4, n) -> (n,)
    return value.T.contiguous().reshape(-1).view(torch.int32)


def _reference(received: Tree, name: str, like: Tensor) -> Tensor:  # (n,)
    """The words of what was received under a name in this form, or zeros."""
    mine = received.get(name)
    return words(mine if mine is not None and form_of({"": mine}) == form_of({"": like}) else torch.zeros_like(like))


_BITS = (1, 2, 4, 8, 16, 32, 64, 128)


def packed_bits(chosen: Tensor) -> Tensor:  # (n,) -> (ceil(n / 8),)
    bits = torch.zeros(-(-len(chosen) // 8) * 8, dtype=torch.uint8, device=chosen.device)
    bits[: len(chosen)] = chosen
    return (bits.reshape(-1, 8) * bits.new_tensor(_BITS)).sum(1).to(torch.uint8)


def unpacked_bits(mask: Tensor, size: int) -> Tensor:  # (ceil(n / 8),) -> (n,)
    """The inverse; ValueError if a bit beyond the end is set."""
    bits = (mask[:, None] & mask.new_tensor(_BITS) != 0).reshape(-1)
    if bool(bits[size:].any()):
        raise ValueError("it marks numbers beyond the tensor's end")
    return bits[:size]
