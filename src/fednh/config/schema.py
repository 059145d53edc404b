"""The settings of a run: one typed model is the TOML file, the presets and the command line at once.

Unknown keys and values out of range are errors that name the key, what it got and what it takes.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    create_model,
    field_validator,
    model_validator,
)
from pydantic.errors import PydanticSchemaGenerationError

from fednh.config.options import parse_bytes
from fednh.data.partitions import Partition
from fednh.data.partitions import kinds as partition_kinds
from fednh.data.partitions.kinds import PARTITIONS
from fednh.data.sources import registry
from fednh.errors import ConfigError, Ignored, did_you_mean
from fednh.methods import METHODS, Method
from fednh.methods.fit import Sgd
from fednh.methods.losses import SMOOTHING
from fednh.methods.registry import find_method, hyper_parameters
from fednh.models.backbone import ONNX, PINNED
from fednh.text import name_problem

WRITTEN = {"written": True}  # context of a config that a run has written: complete, so nothing need be imported

DEFAULT_METHOD = "fednh"
MANY = 10**9  # the limit of every count; more is a typing error
DEFAULT_NORM_BOUND = 100.0


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, strict=True)


class DataSection(Section):
    """What all data have; the other settings are declared by the kinds in data/sources."""

    name: str = "digits"  # a data set by name, or a source of your own; `fednh datasets` lists both
    dir: str | None = None  # where named data sets lie; None: $FEDNH_DATA, or the user's cache
    augment: Literal["auto", "none", "crop_flip"] = "auto"  # auto: as the data set's literature does
    merge_test: bool = False  # the test part joins the training part; clients hold out some of their own samples
    holdout: float | None = Field(None, ge=0, lt=1)  # of every client's classes; None: 0.2 without a test set, else 0
    folds: int | None = Field(None, ge=2, le=1000)  # of every client's samples; one is held out; not with holdout
    limit: int | None = Field(None, ge=1, le=MANY)  # samples that a client trains on, by class shares; None: all
    fold: int = Field(0, ge=0, le=999)  # the one that is held out, from 0 to data.folds - 1; the seed does not matter

    @model_validator(mode="after")
    def _one_way_to_hold_out(self) -> DataSection:
        if self.folds is not None and self.holdout is not None:
            raise ValueError("takes data.folds or data.holdout, not both")
        if self.fold >= (self.folds or 1):
            raise ValueError(f"has no fold {self.fold}: with data.folds = {self.folds} they count from 0")
        return self

    if TYPE_CHECKING:

        def __getattr__(self, setting: str) -> Any: ...


if TYPE_CHECKING:
    DataConfig = DataSection
else:
    DataConfig = create_model("DataConfig", __base__=DataSection, **registry.settings())


class PartitionSection(Section):
    """What all partitions have; the other settings are declared by the kinds in data/partitions."""

    name: str = "dirichlet"  # how samples are dealt to clients; `fednh partitions` explains each
    clients: int = 100  # how many; of site: as many as the data has
    min_samples: int = 10

    @property
    def kind(self) -> Partition:
        """The partition with the settings that it uses."""
        kind = PARTITIONS[self.name]
        return kind(**{setting.name: getattr(self, setting.name) for setting in dataclasses.fields(kind)})


if TYPE_CHECKING:
    PartitionConfig = PartitionSection
else:
    PartitionConfig = create_model(
        "PartitionConfig",
        __base__=PartitionSection,
        name=(Literal[tuple(PARTITIONS)], "dirichlet"),
        **partition_kinds.settings(),
    )


class ParticipationConfig(Section):
    # gamma: ceil(gamma * clients) are picked in every round; unless set, 1 for natural sites, up to 20 clients, and
    # methods that train nothing
    rate: float = Field(0.1, gt=0, le=1)
    dropout: float = Field(0.0, ge=0, lt=1)  # the chance that a picked client never reports


class ModelConfig(Section):
    # auto, linear, mlp, conv2, cnn, resnet18, timm:ARCHITECTURE or package.module:Class; a frozen one may also be
    # efficientnet_lite0 or onnx:FILE
    name: str = "auto"
    args: dict[str, Any] = Field(default_factory=dict)  # of the model's constructor
    head: str | None = None  # of a module without .body and .head: the name of its last linear layer; None: found
    weights: str | None = None  # a safetensors file to start from
    norm: Literal["refuse", "local"] = "refuse"  # batch normalisation is refused, or normalisation stays with clients
    convolution: Literal["fast", "ordinary"] = "fast"  # on a CPU; both give the same to 1e-5
    frozen: Literal["none", "body"] = "none"  # body: it only computes features, once a sample, and is not trained
    adapter: Literal["none", "linear", "mlp"] = "none"  # what is trained between a frozen body and the head
    width: int = Field(128, ge=1, le=MANY)  # of the adapter's output

    @property
    def trained(self) -> tuple[str, dict[str, Any]]:
        """The name and the arguments of the network that clients train: all of it, or what follows a frozen body."""
        if self.frozen == "none":
            return self.name, self.args
        if self.adapter == "none":
            return "linear", {}
        return "mlp", {"hidden": [self.width], "linear_output": self.adapter == "linear"}

    @property
    def weights_file(self) -> str | None:
        """The file that the network starts from or, frozen, consists of; None: there is none."""
        return self.name.removeprefix(ONNX) if self.name.startswith(ONNX) else self.weights

    @model_validator(mode="after")
    def _adapter_needs_frozen_body(self) -> ModelConfig:
        if self.frozen == "none" and (self.name in PINNED or self.name.startswith(ONNX)):
            raise ValueError(f"name = {self.name!r} is not trained but computes features; set model.frozen = 'body'")
        if self.adapter != "none" and self.frozen == "none":
            raise ValueError("takes adapter only behind a frozen body; set model.frozen = 'body'")
        if self.frozen == "body" and self.name == "auto":
            raise ValueError(
                "frozen = 'body' needs a pretrained network: set model.name = 'efficientnet_lite0', 'onnx:FILE', or "
                "another one with model.weights"
            )
        return self


Pixels = Annotated[list[float] | None, Field(min_length=3, max_length=3)]


class FeaturesConfig(Section):
    """How a frozen body sees images (`model.frozen`)."""

    size: int = Field(112, ge=8, le=4096)  # pixels a side, to which images are brought
    views: int = Field(1, ge=1, le=1000)  # of a training image: itself, and others that are cropped and flipped
    mean: Pixels = None  # of red, green and blue, from 0 to 1, that the body expects; None: ImageNet's
    std: Pixels = None  # the same for their deviation
    sha256: str | None = Field(None, pattern=r"^[0-9a-f]{64}$")  # of the weights' file: any other is refused


class TrainConfig(Section):
    epochs: int = Field(5, ge=1, le=MANY)  # passes over a client's samples in a round
    batch_size: int = Field(64, ge=1, le=MANY)  # samples in a step
    lr: float = Field(0.01, gt=0)  # the learning rate of SGD in the first round
    lr_decay: float = Field(0.99, gt=0, le=1)  # the learning rate of round t is lr * lr_decay^(t - 1)
    momentum: float = Field(0.9, ge=0, lt=1)  # of SGD; it starts anew in every round
    weight_decay: float = Field(1e-5, ge=0)  # times the weight, added to its gradient
    clip: float = Field(10.0, ge=0)  # largest gradient norm; 0: no clipping

    def sgd(self, round_: int) -> Sgd:
        """The optimiser's settings in a round, counted from 1."""
        lr = self.lr * self.lr_decay ** (round_ - 1)
        return Sgd(lr, self.momentum, self.weight_decay, self.clip, self.batch_size, self.epochs)


class ServerConfig(Section):
    """What the server does with the mean of what clients trained (federated/server_optimizer.py)."""

    optimizer: Literal["mean", "momentum", "adam", "yogi"] = "mean"  # take the mean, FedAvgM, FedAdam, FedYogi
    lr: float | None = Field(None, gt=0)  # eta; None: 1 for mean and momentum, 0.01 for adam and yogi
    momentum: float = Field(0.9, ge=0, lt=1)  # beta of momentum, beta_1 of adam and yogi
    beta2: float = Field(0.99, ge=0, lt=1)  # of adam and yogi
    tau: float = Field(1e-3, gt=0)  # of adam and yogi: how little they adapt

    @property
    def learning_rate(self) -> float:
        default = 0.01 if self.optimizer in ("adam", "yogi") else 1.0
        return default if self.lr is None else self.lr


class PersonalConfig(Section):
    model: Literal["own", "global"] = "own"  # whose weights a client's model has: its own by the method, or the global
    prior: float = Field(0.0, ge=0)  # tau: how much of the client's log class share is added to its logits
    smoothing: float = Field(SMOOTHING, gt=0)  # samples added to every class before shares are taken
    # a client chooses its temperature, and its tau where prior is 0; None: with methods that train nothing
    calibrate: bool | None = None


OWN = PersonalConfig()  # as the method makes them


class EvalConfig(Section):
    every: int = Field(10, ge=0, le=MANY)  # rounds between evaluations; 0: only at the end
    clients: Literal["active", "all"] | int = (
        "active"  # whose personal models: the round's, all so far, or a sample of n
    )
    final: Literal["all"] | int = "all"  # whose, at the end, to evaluate and to save: all that took part, or n of them

    samples: int | None = Field(None, ge=1, le=MANY)  # of the test set: a class-balanced sample of n; None: all

    @field_validator("clients", "final")
    @classmethod
    def _at_least_one(cls, value: str | int, info: ValidationInfo) -> str | int:
        if isinstance(value, int) and value < 1:
            words = "'active', 'all'" if info.field_name == "clients" else "'all'"
            raise ValueError(f"should be {words} or a number of clients, 1 or more")
        return value


class CheckpointConfig(Section):
    every: int = Field(5, ge=0, le=MANY)  # rounds between checkpoints; 0: none


class StoreConfig(Section):
    memory: int | str = "25%"  # bytes of client state kept in memory, "2GiB", or a share of RAM; the rest is on disk

    @field_validator("memory")
    @classmethod
    def _readable(cls, value: int | str) -> int | str:
        parse_bytes(value, total=1 << 30)
        return value


class DiagnosticsConfig(Section):
    gradient_norm: bool = False  # log the squared norm of the body's full gradient on every picked client's data


class FederationConfig(Section):
    """Of federations on Flower; the in-process simulator needs none of it."""

    name: str = Field("fednh", min_length=1)  # sites keep their personal state by it
    folder: str | None = None  # the server's run folder
    key: str | None = None  # the file with which it signs orders; None: certs/orders.key beside the run folder
    min_clients: int = Field(2, ge=1, le=MANY)  # usable uploads that a round needs, or it is given up
    start: int | None = Field(None, ge=1, le=MANY)  # sites needed before the first round; None: min_clients
    timeout: float = Field(600.0, gt=0)  # seconds in which a site must answer
    wait: float = Field(86400.0, gt=0)  # seconds to wait for enough sites before the first round; then the run ends
    site_bytes: int = Field(64 << 20, ge=1)  # of a site's replies that wait at the server; more for large models
    test: str | None = None  # a data source whose test part is a balanced test set at the server

    @property
    def enough(self) -> int:
        """Sites that must be present before the first round."""
        return max(self.start or 0, self.min_clients)

    @field_validator("name")
    @classmethod
    def _harmless(cls, value: str) -> str:
        if problem := name_problem(value):
            raise ValueError(f"should be a plain name: {problem}")
        return value


class RayConfig(Section):
    """What a client reserves on a Ray cluster (`--backend ray`); the result does not depend on it."""

    cpus_per_client: float = Field(1.0, ge=0, le=MANY)  # it computes in one thread, however many
    gpus_per_client: float | None = Field(None, ge=0, le=MANY)  # 0.25: four share one; None: 0 on the CPU, else 1
    resources: dict[str, float] = Field(default_factory=dict)  # of your own, as `ray start --resources` names them

    @model_validator(mode="after")
    def _something(self) -> RayConfig:
        if not self.cpus_per_client and not self.gpus_per_client and not any(self.resources.values()):
            raise ValueError("a client must reserve something: cpus_per_client, gpus_per_client or resources")
        return self


class Config(Section):
    """Everything that a run depends on; the paper's common settings are the defaults."""

    seed: int = Field(0, ge=0, lt=2**31)  # everything random derives from it, a purpose, the round and the client
    rounds: int = Field(200, ge=1, le=MANY)  # of communication; unless set, 1 for methods that train nothing
    workers: int = Field(0, ge=0, le=1024)  # clients trained at once, one thread each; 0: one per core
    engine: Literal["auto", "loop", "vmap"] = "auto"  # one client at a time on a worker, or a block of small ones
    device: str = "cpu"  # where tensors live: cpu, cuda, cuda:1
    precision: Literal["float32", "bf16"] = "float32"  # of the body's arithmetic; parameters are float32 always
    # how uploads are averaged; weighted_mean: by training samples
    aggregator: Literal["mean", "weighted_mean", "median", "trimmed_mean", "norm_clip"] = "mean"
    trim: float = Field(0.2, gt=0, lt=0.5)  # of trimmed_mean: the share that is cut off at each end
    bound: float | None = Field(None, ge=0)  # uploads more than this many times longer than usual are refused; 0: none
    on_error: Literal["stop", "skip"] = "stop"  # when a client's training raises an error
    data: DataConfig = DataConfig()
    partition: PartitionConfig = PartitionConfig()
    participation: ParticipationConfig = ParticipationConfig()
    model: ModelConfig = ModelConfig()
    features: FeaturesConfig = FeaturesConfig()
    method: dict[str, Any] = Field(default_factory=lambda: {"name": DEFAULT_METHOD})
    train: TrainConfig = TrainConfig()
    server: ServerConfig = ServerConfig()
    personal: PersonalConfig = PersonalConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    store: StoreConfig = StoreConfig()
    diagnostics: DiagnosticsConfig = DiagnosticsConfig()
    federation: FederationConfig = FederationConfig()
    ray: RayConfig = RayConfig()

    @model_validator(mode="after")
    def _complete_method(self, info: ValidationInfo) -> Config:
        """Check the method's hyper-parameters and fill in its defaults, so that a written config is complete."""
        if info.context == WRITTEN:
            return self
        method = build_method(self.method)
        full = {"name": self.method.get("name", DEFAULT_METHOD), **dataclasses.asdict(method)}
        object.__setattr__(self, "method", full)
        return self

    def upload_bound(self, deployed: bool) -> float:
        """How many times longer than usual an upload may be; 0, the default in a simulation: no limit."""
        default = DEFAULT_NORM_BOUND if deployed else 0.0
        return default if self.bound is None else self.bound

    def build_method(self) -> Method:
        return build_method(self.method)


def build_method(section: Mapping[str, Any]) -> Method:
    """The Method that a [method] section describes."""
    fields = dict(section)
    name = fields.pop("name", DEFAULT_METHOD)
    method = find_method(name)
    known = hyper_parameters(name)
    for key in [key for key in fields if key not in known]:
        owners = [other for other in METHODS if key in hyper_parameters(other)]
        if not owners:
            takes = did_you_mean(key, known) if known else "; it takes none"
            raise ConfigError(f"method.{key} is not a hyper-parameter of {name}{takes}")
        # One command line for several methods is useful; a word that no method knows is a typing error.
        warnings.warn(
            f"method.{key} is a setting of {', '.join(owners)}, not of {name}: ignored", Ignored, stacklevel=2
        )
        del fields[key]
    try:
        return TypeAdapter(method).validate_python(fields, strict=False)
    except ValidationError as error:
        raise ConfigError(explain(error, "method.")) from error
    except PydanticSchemaGenerationError as error:
        raise ConfigError(f"method.name = {name!r}: a hyper-parameter has a type that no setting can have") from error
    except Exception as error:  # anything that a user's method raises when it is created
        raise ConfigError(f"method.name = {name!r} cannot be made: {type(error).__name__}: {error}") from error


def explain(error: ValidationError, prefix: str = "") -> str:
    """The first problem of a validation error as one sentence: key = value, and what it takes."""
    first = error.errors()[0]
    key = prefix + ".".join(
        str(part) for part in first["loc"] if part not in ("int", "str") and "literal" not in str(part)
    )
    more = f" (and {error.error_count() - 1} more)" if len({e["loc"][:2] for e in error.errors()}) > 1 else ""
    message = first["msg"].removeprefix("Value error, ").removeprefix("Input ")
    if first["type"] == "extra_forbidden":
        return f"{key} is not a setting{did_you_mean(key, _keys())}{more}"
    return f"{key} = {first['input']!r} {message}{more}"


def _keys() -> list[str]:
    keys = []
    for name, field in Config.model_fields.items():
        section = field.annotation
        if isinstance(section, type) and issubclass(section, Section):
            keys += [f"{name}.{key}" for key in section.model_fields]
        else:
            keys.append(name)
    return keys
