"""The settings of a run: one typed model is the TOML file, the presets and the command line at once.

Unknown keys and values out of range are errors that name the key, what it got and what it takes.
"""

from __future__ import annotations

import dataclasses
import math
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
from fednh.methods.losses import SMOOTHING
from fednh.methods.optimizers import Adam, FitSettings, Sgd
from fednh.methods.registry import find_method, hyper_parameters
from fednh.metric_names import TEST_SET
from fednh.models.backbone import ONNX, PINNED
from fednh.text import name_problem

WRITTEN = {"written": True}  # context of a config that a run has written: complete, so nothing need be imported

DEFAULT_METHOD = "fednh"
MANY = 10**9  # the limit of every count; more is a typing error
DEFAULT_NORM_BOUND = 100.0
COMMON_DIM = 128  # features, where clients have different networks
LARGEST_EPSILON = 100.0  # more promises nothing


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
    # efficientnet_lite0 or onnx:FILE. Clients may differ: a list is dealt to them in turn, a table has one a site
    name: str | list[str] | dict[str, str] = "auto"
    args: dict[str, Any] = Field(
        default_factory=dict
    )  # of the model's constructor; where clients differ, one table each
    # features before the head, to which a linear layer brings a network that has others; None: 128 where clients
    # differ, else the network's own
    dim: int | None = Field(None, ge=1, le=MANY)
    head: str | None = None  # of a module without .body and .head: the name of its last linear layer; None: found
    weights: str | None = None  # a safetensors file to start from
    # batch normalisation is refused, normalisation stays with clients, batch normalisation is averaged with its running
    # statistics, or group normalisation takes its place
    norm: Literal["refuse", "local", "average", "group"] = "refuse"
    groups: int = Field(2, ge=1, le=MANY)  # of each layer that model.norm = "group" puts in
    convolution: Literal["fast", "ordinary"] = "fast"  # on a CPU; both give the same to 1e-5
    frozen: Literal["none", "body"] = "none"  # body: it only computes features, once a sample, and is not trained
    adapter: Literal["none", "linear", "mlp"] = "none"  # what is trained between a frozen body and the head
    width: int = Field(128, ge=1, le=MANY)  # of the adapter's output

    @property
    def names(self) -> tuple[str, ...]:
        """The networks of the run, each once, in the order in which they are given."""
        if isinstance(self.name, str):
            return (self.name,)
        return tuple(dict.fromkeys(self.name.values() if isinstance(self.name, dict) else self.name))

    @property
    def differs(self) -> bool:
        """Whether clients have different networks."""
        return len(self.names) > 1

    @property
    def network(self) -> str:
        """The run's only network, by name; empty where clients differ."""
        return "" if self.differs else self.names[0]

    @property
    def common_dim(self) -> int | None:
        """The number of features to which every network is brought; None: it keeps its own."""
        return COMMON_DIM if self.dim is None and self.differs else self.dim

    def of_client(self, client: int, site: str | None = None) -> str:
        """The network of a client, by its number and, in a table, by the name of its site."""
        if isinstance(self.name, str):
            return self.name
        if isinstance(self.name, list):
            return self.name[client % len(self.name)]
        if site not in self.name:
            raise ConfigError(
                "model.name has a network for each site, and clients of this partition have no sites; give a list"
                if site is None
                else f"model.name has no network for site {site}; it has {', '.join(self.name)}"
            )
        return self.name[site]

    def only(self, name: str) -> ModelConfig:
        """The settings of a client with this network: those of a run whose clients all have it."""
        if not self.differs:
            return self
        return self.model_copy(update={"name": name, "args": self.args.get(name, {}), "dim": self.common_dim})

    @property
    def trained(self) -> tuple[str, dict[str, Any]]:
        """The name and the arguments of the network that clients train: all of it, or what follows a frozen body."""
        if self.frozen == "none":
            return self.network, self.args
        if self.adapter == "none":
            return "linear", {}
        return "mlp", {"hidden": [self.width], "linear_output": self.adapter == "linear"}

    @property
    def norm_rule(self) -> str:
        """The rule for normalisation as a network takes it."""
        return f"group:{self.groups}" if self.norm == "group" else self.norm

    @property
    def weights_file(self) -> str | None:
        """The file that the network starts from or, frozen, consists of; None: there is none."""
        return self.network.removeprefix(ONNX) if self.network.startswith(ONNX) else self.weights

    @field_validator("name")
    @classmethod
    def _some_network(cls, name: str | list[str] | dict[str, str]) -> str | list[str] | dict[str, str]:
        if not name:
            raise ValueError("should be a network, a list of them for clients in turn, or a table with one a site")
        return name

    @model_validator(mode="after")
    def _adapter_needs_frozen_body(self) -> ModelConfig:
        trained = [name for name in self.names if name in PINNED or name.startswith(ONNX)]
        if self.frozen == "none" and trained:
            raise ValueError(f"name = {trained[0]!r} is not trained but computes features; set model.frozen = 'body'")
        if self.adapter != "none" and self.frozen == "none":
            raise ValueError("takes adapter only behind a frozen body; set model.frozen = 'body'")
        if self.frozen == "body" and self.network == "auto":
            raise ValueError(
                "frozen = 'body' needs a pretrained network: set model.name = 'efficientnet_lite0', 'onnx:FILE', or "
                "another one with model.weights"
            )
        return self

    @model_validator(mode="after")
    def _clients_may_differ(self) -> ModelConfig:
        for key, default in (("frozen", "none"), ("weights", None), ("head", None)):
            if self.differs and getattr(self, key) != default:
                raise ValueError(f"{key} is of one network, and clients have {', '.join(self.names)}; leave it out")
            if self.dim is not None and key != "head" and getattr(self, key) != default:
                raise ValueError(f"dim changes the network, and {key} takes it as it is; leave one of them out")
        if not self.differs:
            return self
        if unfit := [name for name in self.names if name == "auto" or "/" in name]:
            raise ValueError(
                f"name = {unfit[0]!r} cannot be one of several networks; name one of fednh, timm or your own"
            )
        for key, value in self.args.items():
            if key not in self.names or not isinstance(value, dict):
                raise ValueError(
                    f"args.{key} is not understood: where clients have different networks, args has a table for each, "
                    f"as [model.args.{self.names[0]}]"
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
    epochs: int | float = Field(5, gt=0, le=MANY)  # passes over a client's samples in a round; 0.5: over half of them
    steps: int | None = Field(None, ge=1, le=MANY)  # batches in a round, in place of epochs, however many samples
    batch_size: int = Field(64, ge=1, le=MANY)  # samples in a step
    optimizer: Literal["sgd", "adam", "adamw"] = "sgd"  # of clients; AdamW's weight decay acts on weights alone
    optimizer_state: Literal["fresh", "kept"] = "fresh"  # starts anew in every round, or stays with the client
    lr: float = Field(0.01, gt=0)  # the learning rate before the schedule; 0.001 is usual for adam and adamw
    # how the learning rate goes from round to round: times lr_decay a round, not at all, down to lr_end by half a
    # cosine, or times lr_decay every lr_step rounds
    schedule: Literal["exponential", "constant", "cosine", "step"] = "exponential"
    lr_decay: float = Field(0.99, gt=0, le=1)  # of exponential: lr * lr_decay^(t - 1) in round t; of step: the factor
    lr_step: int = Field(50, ge=1, le=MANY)  # of step: rounds between two reductions
    lr_end: float = Field(0.0, ge=0)  # of cosine: what the rate would reach one round after the last
    warmup: int = Field(
        0, ge=0, le=MANY
    )  # rounds t in which the rate is lr * t / (warmup + 1); then the schedule starts
    momentum: float = Field(0.9, ge=0, lt=1)  # of SGD; beta_1 of adam and adamw
    beta2: float = Field(0.999, ge=0, lt=1)  # of adam and adamw
    epsilon: float = Field(1e-8, gt=0)  # of adam and adamw
    weight_decay: float = Field(1e-5, ge=0)  # times the weight, added to its gradient
    clip: float = Field(10.0, ge=0)  # largest gradient norm; 0: no clipping

    @field_validator("epochs")
    @classmethod
    def _whole_is_int(cls, value: float) -> float:
        return int(value) if value % 1 == 0 else value

    @property
    def fit_settings(self) -> FitSettings:
        """How clients train, at the full learning rate."""
        shared = (self.lr, self.momentum, self.weight_decay, self.clip, self.batch_size, self.epochs, self.steps)
        kept = self.optimizer_state == "kept"
        if self.optimizer == "sgd":
            return Sgd(*shared, kept)
        return Adam(*shared, kept, self.beta2, self.epsilon, decoupled=self.optimizer == "adamw")

    @property
    def whole_epochs(self) -> bool:
        """Whether a client trains on all of its samples equally often."""
        return self.steps is None and self.epochs % 1 == 0

    def rate(self, round_: int, rounds: int) -> float:
        """The learning rate of a round, counted from 1, of so many."""
        if round_ <= self.warmup:
            return self.lr * round_ / (self.warmup + 1)
        past, whole = round_ - 1 - self.warmup, rounds - self.warmup
        match self.schedule:
            case "exponential":
                return self.lr * self.lr_decay**past
            case "constant":
                return self.lr
            case "cosine":
                return self.lr_end + (self.lr - self.lr_end) * (1 + math.cos(math.pi * past / whole)) / 2
            case "step":
                return self.lr * self.lr_decay ** (past // self.lr_step)


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
    # tau: how much of the client's log class share is added to its logits; None: 1 for fedprior, 0 for all others
    prior: float | None = Field(None, ge=0)
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


class StopConfig(Section):
    """Which round's models a run keeps, chosen on the clients' held-out samples; the rest of its rounds is left out."""

    # the accuracy that is compared at every evaluation; none: all rounds are run and the last one is kept
    metric: Literal["none", "held_share", "held_macro", "held_gm_share", "held_gm_macro"] = "none"
    patience: int = Field(5, ge=1, le=MANY)  # evaluations in a row without a better one, after which the run ends
    gain: float = Field(0.0, ge=0, le=100)  # points by which an accuracy must exceed the best to be better

    @field_validator("metric", mode="before")
    @classmethod
    def _not_on_the_test_set(cls, metric: Any) -> Any:
        if metric in TEST_SET:
            raise ValueError(
                "is measured on the test set, which must not choose a round; take 'held_share', on held-out samples"
            )
        return metric


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
    """Of federations on Flower; of these the in-process simulator needs how uploads are compressed alone."""

    name: str = Field("fednh", min_length=1)  # sites keep their personal state by it
    folder: str | None = None  # the server's run folder
    key: str | None = None  # the file with which it signs orders; None: certs/orders.key beside the run folder
    min_clients: int = Field(2, ge=1, le=MANY)  # usable uploads that a round needs, or it is given up
    start: int | None = Field(None, ge=1, le=MANY)  # sites needed before the first round; None: min_clients
    timeout: float = Field(600.0, gt=0)  # seconds in which a site must answer
    # a round waits for a site no longer than so many times what its usual site takes; None: timeout alone
    slack: float | None = Field(None, gt=1)
    late: Literal["drop", "use"] = "drop"  # an upload that arrives in a later round: it counts less, the older it is
    wait: float = Field(86400.0, gt=0)  # seconds to wait for enough sites before the first round; then the run ends
    # the server sees sums of uploads only, of more than half of a round's sites and of min_clients or more
    secure: bool = False
    # smaller uploads, in a simulation too: lossless changes no bit, int8 has 255 levels a row, top-k sends the largest
    # numbers; what these two lose is sent later
    compress: Literal["none", "lossless", "int8", "top-k"] = "none"
    compress_share: float = Field(0.05, gt=0, le=0.5)  # of top-k: the share of every tensor's numbers that is sent
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


class PrivacyConfig(Section):
    """Differential privacy: noise in everything that leaves, and its account; docs/privacy.md."""

    level: Literal["none", "sample", "client"] = "none"  # whose presence is hidden: one sample's, or a whole client's
    # for the planned rounds together; the noise is found for it
    epsilon: float | None = Field(None, gt=0, le=LARGEST_EPSILON)
    noise: float | None = Field(None, ge=0.1, le=1e6)  # in place of epsilon: standard deviation over sensitivity
    delta: float = Field(1e-5, gt=0, le=1e-3)  # should be far below one over the number of samples, or clients
    # largest norm of a sample's gradient, or of a client's whole move; adaptive: of clients, near the median of theirs
    clip: Annotated[float, Field(gt=0)] | Literal["adaptive"] = 1.0
    rate: float = Field(0.1, gt=0, le=1)  # of level sample: the chance of a sample to be in a step; 1 / rate an epoch
    sums_share: float = Field(0.2, gt=0, lt=1)  # of the budget, for class sums and counts that leave beside gradients

    @model_validator(mode="after")
    def _one_budget(self) -> PrivacyConfig:
        given = [name for name in ("epsilon", "noise") if getattr(self, name) is not None]
        if self.level == "none":
            if given:
                raise ValueError(f"level = 'none' protects nothing, yet privacy.{given[0]} is set; set privacy.level")
            return self
        if len(given) != 1:
            raise ValueError(f"level = {self.level!r} takes privacy.epsilon or privacy.noise, and one of them")
        if self.level == "sample" and self.clip == "adaptive":
            raise ValueError("clip = 'adaptive' is of privacy.level = 'client'; give level 'sample' a number")
        return self


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
    device: str = "cpu"  # where tensors live: cpu, cuda, cuda:1, mps, or several between which clients are divided
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
    stop_when: StopConfig = StopConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    store: StoreConfig = StoreConfig()
    diagnostics: DiagnosticsConfig = DiagnosticsConfig()
    privacy: PrivacyConfig = PrivacyConfig()
    federation: FederationConfig = FederationConfig()
    ray: RayConfig = RayConfig()

    @model_validator(mode="after")
    def _complete_method(self, info: ValidationInfo) -> Config:
        """Check the method's hyper-parameters and fill in its defaults, so that a written config is complete."""
        if info.context == WRITTEN:
            return self
        method = build_method(self.method)
        name = self.method.get("name", DEFAULT_METHOD)
        check_networks(method, name, self.model)
        if self.model.differs and self.federation.secure:
            raise ConfigError(
                "federation.secure adds uploads of one form, and model.name has several networks; give one"
            )
        if self.model.differs and self.privacy.level != "none":
            raise ConfigError("privacy.level is accounted for one network, and model.name has several; give one")
        compress = self.federation.compress
        if compress != "none" and self.federation.secure:
            raise ConfigError(
                f"federation.compress = {compress!r} makes single uploads smaller, and federation.secure masks "
                f"them in full size; leave one of them out"
            )
        if compress in ("int8", "top-k") and self.privacy.level == "client":
            raise ConfigError(
                f"federation.compress = {compress!r} sends later what a round has lost, and privacy.level = 'client' "
                f"accounts for what a client moves in the rounds that it is in; use 'lossless' or 'none'"
            )
        if method.doubles and any(device.partition(":")[0] == "mps" for device in self.devices):
            raise ConfigError(f"device = {self.device!r} lacks double precision, which {name} needs; use 'cpu'")
        full = {"name": self.method.get("name", DEFAULT_METHOD), **dataclasses.asdict(method)}
        object.__setattr__(self, "method", full)
        self._check_stop_when()
        for key, only in (("optimizer", "sgd"), ("optimizer_state", "fresh")):
            if method.sgd_only and (chosen := getattr(self.train, key)) != only:
                raise ConfigError(
                    f"train.{key} = {chosen!r} is not supported by method {full['name']}, which divides what clients "
                    f"moved by how far steps of SGD from a fresh start reach; leave it at {only!r}"
                )
        return self

    def _check_stop_when(self) -> None:
        """Refuse a choice of rounds that compares different clients, or uses samples that an account does not cover."""
        if self.stop_when.metric == "none":
            return
        everybody = self.participation.rate == 1 and not self.participation.dropout
        if not self.eval.every:
            raise ConfigError("stop_when compares evaluations, and eval.every = 0 makes none; set eval.every")
        if self.eval.clients != "all" and not (self.eval.clients == "active" and everybody):
            raise ConfigError(
                f"stop_when compares rounds, and with eval.clients = {self.eval.clients!r} each would be measured on "
                f"other clients; set eval.clients = 'all'"
            )
        if self.privacy.level != "none":
            raise ConfigError(
                "stop_when looks at held-out samples without noise, which privacy.level does not account for; leave it "
                "out"
            )

    def fit_settings(self, round_: int) -> FitSettings:
        """How clients train in a round, counted from 1."""
        return dataclasses.replace(self.train.fit_settings, lr=self.train.rate(round_, self.rounds))

    def passes(self) -> dict[str, float]:
        """How often a client goes through its samples in a round, at most, by the settings that say so.

        A step is a pass at most: what a site compares with its limit does not depend on how many samples it has.
        """
        length = "epochs" if self.train.steps is None else "steps"
        asked = self.build_method().passes(getattr(self.train, length))
        return {f"train.{length}" if key == "train.epochs" else key: number for key, number in asked.items()}

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices on which clients are computed; the first has the server's state as well."""
        return tuple(name.strip() for name in self.device.split(","))

    @property
    def home(self) -> str:
        """The device of the server's state and of what clients keep."""
        return self.devices[0]

    def upload_bound(self, deployed: bool) -> float:
        """How many times longer than usual an upload may be; 0, the default in a simulation: no limit."""
        default = DEFAULT_NORM_BOUND if deployed and not self.federation.secure else 0.0
        return default if self.bound is None else self.bound

    def build_method(self) -> Method:
        return build_method(self.method)


def check_networks(method: Method, name: str, model: ModelConfig) -> None:
    """Refuse networks that differ by client for a method that does not say how it works with them."""
    if not model.differs or (method.by_architecture is not None and not method.upload.recorded):
        return
    able = [each for each, kind in METHODS.items() if kind.by_architecture is not None]
    raise ConfigError(
        f"method {name} needs one network for all clients, and model.name has {', '.join(model.names)}; methods for "
        f"clients with different networks are {', '.join(able)}"
    )


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
