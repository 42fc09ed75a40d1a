"""The typed YAML file that `voltserve deploy` runs: models, their replicas, and the resources of one replica.

    schema: 1
    models:
      - name: qwen                # its Serve application is voltserve-qwen
        flags: {model: /models/qwen, served-model-name: [qwen], max-model-len: 8192}
        replicas: 2
        gpus: 2
      - name: small
        flags: {model: /models/small, served-model-name: [small]}
        autoscaling: {min: 1, max: 4, requests_per_replica: 16}
        gpus: 1

A model's flags are serve's and vLLM's own, as in the file of --engines. They beat a machine's environment. The model's
directory must be on each machine. Each replica picks its preset for the GPUs that Ray gives it. `python -m
server.schemas` makes the file's JSON Schema, docs/schemas/cluster.json.
"""

import hashlib
import importlib.metadata
import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from server.config.engines_file import checked_flags
from server.config.flags import FlagValue
from server.config.render import INHERITED, is_inherited
from server.config.typed_yaml import read_yaml

Positive = Annotated[float, Field(gt=0)]
Port = Annotated[int, Field(ge=1024, le=65535)]


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Autoscaling(_Strict):
    """Bounds and pace of a model's automatic number of replicas. Ray Serve wants as many as its requests fill."""

    min: Annotated[int, Field(ge=1)] = Field(1, description="Fewest replicas.")
    max: Annotated[int, Field(ge=1)] = Field(description="Most replicas.")
    requests_per_replica: Positive = Field(description="Requests, running or waiting, that fill one replica.")
    up_after: Annotated[float, Field(ge=0)] = Field(
        default=10, description="Seconds of higher load before a replica is added."
    )
    down_after: Annotated[float, Field(ge=0)] = Field(
        default=300, description="Seconds of lower load before a replica is removed."
    )

    @model_validator(mode="after")
    def _ordered(self) -> "Autoscaling":
        if self.max < self.min:
            raise ValueError(f"max is {self.max}, below min, {self.min}")
        return self


class Model(_Strict):
    """One model, its replicas, and what Ray reserves for each of them."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$")] = Field(
        description="Its name in /health and metrics; its Serve application is voltserve-NAME."
    )
    flags: dict[str, FlagValue] = Field(
        description="Flags of `voltserve serve` and of vLLM's server, without dashes; they beat the environment."
    )
    replicas: Annotated[int, Field(ge=1)] | None = Field(None, description="A fixed number of replicas; 1 by default.")
    autoscaling: Autoscaling | None = Field(None, description="A number that follows the load, instead of `replicas`.")
    gpus: Annotated[int, Field(ge=0)] = Field(0, description="GPUs of one replica; with `nodes`, on each machine.")
    cpus: Annotated[float, Field(ge=0)] = Field(1, description="CPUs that Ray reserves for one replica.")
    resources: dict[str, Positive] = Field(
        {}, description="The cluster's own resources that one replica takes, by name."
    )
    per_node: Annotated[int, Field(ge=1, le=100)] | None = Field(None, description="Most replicas on one machine.")
    nodes: Annotated[int, Field(ge=1)] = Field(
        1, description="Machines that one replica is split over; its engine then asks Ray for the GPUs."
    )
    env: dict[str, str] = Field({}, description="Variables of the engine's environment.")
    drain: Positive = Field(300, description="Seconds in which requests may finish before a replica is stopped.")
    surge: bool = Field(True, description="Whether an update first starts one more replica, where there is room.")
    revision: str = Field("", description="Any text; a change restarts all replicas.")

    @model_validator(mode="after")
    def _complete(self) -> "Model":
        if self.replicas is not None and self.autoscaling is not None:
            raise ValueError("replicas and autoscaling exclude each other")
        if not self.flags.get("model"):
            raise ValueError("flags name no model: expected flags.model, its directory on every machine")
        for name in self.env:
            if not is_inherited(name):
                raise ValueError(f"env: the engine gets no {name!r}; it gets {', '.join(INHERITED)}")
        return self

    @property
    def served(self) -> tuple[str, ...]:
        """The names that requests ask for."""
        names = self.flags.get("served-model-name", self.flags["model"])
        return tuple(str(name) for name in names) if isinstance(names, list) else (str(names),)

    @property
    def least(self) -> int:
        """How many replicas it has at least, while there is room."""
        return self.autoscaling.min if self.autoscaling else self.replicas or 1

    @property
    def application(self) -> str:
        """Its Serve application."""
        return f"voltserve-{self.name}"


class ClusterFile(_Strict):
    """The whole file."""

    schema_version: Literal[1] = Field(alias="schema", description="The version of this format.")
    models: Annotated[tuple[Model, ...], Field(min_length=1)] = Field(description="The models that are served.")
    ports: tuple[Port, Port] | None = Field(
        None, description="First and last port for replicas to listen on; any free port by default."
    )

    @model_validator(mode="after")
    def _consistent(self) -> "ClusterFile":
        names = [model.name for model in self.models]
        if len(set(names)) < len(names):
            raise ValueError(f"two models of one name among {', '.join(names)}")
        served: dict[str, str] = {}
        for model in self.models:
            for name in model.served:
                if served.setdefault(name, model.name) != model.name:
                    raise ValueError(f"both {served[name]} and {model.name} are served as {name!r}")
        if self.ports is not None and self.ports[1] < self.ports[0]:
            raise ValueError(f"ports: the last, {self.ports[1]}, is below the first, {self.ports[0]}")
        return self


def read_cluster(path: Path) -> ClusterFile:
    """The file at `path`.

    Raises:
        ConfigError: missing, malformed or contradictory; names the key, or the flag with the nearest valid one.
    """
    file = read_yaml(ClusterFile, path, "--config")
    models = [
        model.model_copy(update={"flags": checked_flags(f"{path}: model {model.name}", model.flags, "deploy")})
        for model in file.models
    ]
    return file.model_copy(update={"models": tuple(models)})


def replica_arguments(file: ClusterFile, model: Model, module: str) -> dict[str, Any]:
    """The arguments that a replica is started with. A change of them restarts the model's replicas.

    Args:
        file: the file that lists the model.
        model: the model.
        module: the Python module that is the engine.
    """
    wanted = model.model_dump(include={"name", "flags", "env", "drain", "gpus", "nodes", "revision"})
    return {**wanted, "ports": file.ports, "module": module}


def version_of(arguments: dict[str, Any]) -> str:
    """A digest of a replica's arguments and of this package's version."""
    text = json.dumps([importlib.metadata.version("voltserve"), arguments], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
