"""What `voltserve deploy` runs: a typed YAML file of models, their replicas, and what one replica takes of its machine.

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

A model's flags are serve's and vLLM's own, as in the file of --engines, and beat what a machine's environment says. The
model's directory must be on each machine. Each replica picks its preset for the GPUs that Ray gives it.
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
    """Between `min` and `max` replicas, as many as the requests under way and waiting fill with
    `requests_per_replica` each; changed once that has been so for `up_after` or `down_after` seconds.
    """

    min: Annotated[int, Field(ge=1)] = 1
    max: Annotated[int, Field(ge=1)]
    requests_per_replica: Positive
    up_after: Annotated[float, Field(ge=0)] = 10
    down_after: Annotated[float, Field(ge=0)] = 300

    @model_validator(mode="after")
    def _ordered(self) -> "Autoscaling":
        if self.max < self.min:
            raise ValueError(f"max is {self.max}, below min, {self.min}")
        return self


class Model(_Strict):
    """One model. `gpus`, `cpus` and `resources` (names of the cluster's own) are what Ray sets aside for one replica.

    `nodes` above 1 splits one replica over machines: its engine then asks Ray for the GPUs, `gpus` on each machine.
    `env` goes to the engine; `drain`: seconds that requests may finish in before a replica is stopped; `surge`: an
    update starts one replica more before it stops one, where there is room; a changed `revision` restarts all replicas.
    """

    name: Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$")]
    flags: dict[str, FlagValue]
    replicas: Annotated[int, Field(ge=1)] | None = None
    autoscaling: Autoscaling | None = None
    gpus: Annotated[int, Field(ge=0)] = 0
    cpus: Annotated[float, Field(ge=0)] = 1
    resources: dict[str, Positive] = {}
    per_node: Annotated[int, Field(ge=1, le=100)] | None = None
    nodes: Annotated[int, Field(ge=1)] = 1
    env: dict[str, str] = {}
    drain: Positive = 300
    surge: bool = True
    revision: str = ""

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
    """The whole file. `ports`: the first and last port that replicas listen at; any free one without it."""

    schema_version: Literal[1] = Field(alias="schema")
    models: Annotated[tuple[Model, ...], Field(min_length=1)]
    ports: tuple[Port, Port] | None = None

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
    """What a replica is started from; when it changes, the replicas are restarted.

    Args:
        file: where the model stands.
        model: the model.
        module: the Python module that is the engine.
    """
    wanted = model.model_dump(include={"name", "flags", "env", "drain", "gpus", "nodes", "revision"})
    return {**wanted, "ports": file.ports, "module": module}


def version_of(arguments: dict[str, Any]) -> str:
    """A digest of what a replica is started from, this package's version included."""
    text = json.dumps([importlib.metadata.version("voltserve"), arguments], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
