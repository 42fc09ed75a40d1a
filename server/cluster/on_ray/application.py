"""The Serve applications: for `on_ray.apply` with all options, and as the builders that KubeRay calls."""

import importlib.metadata
from typing import Any

from ray import serve
from ray.serve import Application

from server.cluster.layout import DEPLOYMENT
from server.cluster.on_ray.directory import Directory
from server.cluster.on_ray.replica import EngineReplica

# Announcements and reads only wait in line. Those of a hundred replicas arrive within one second.
_AT_ONCE = 1000


def directory_with(**options: Any) -> Application:
    """The directory's application with Serve's options; `user_config` is `layout.directory_config`."""
    version = importlib.metadata.version("voltserve")
    own: dict[str, Any] = {"ray_actor_options": {"num_cpus": 0}, "max_ongoing_requests": _AT_ONCE}
    return serve.deployment(Directory, name="directory", version=version, **own, **options).bind()


def engine_with(arguments: dict[str, Any], **options: Any) -> Application:
    """A model's application from `file.replica_arguments` and Serve's options."""
    return serve.deployment(EngineReplica, **{"name": DEPLOYMENT, **options}).bind(arguments)


def directory(_: dict[str, Any]) -> Application:
    """The directory; Serve's options come with the configuration."""
    return directory_with()


def engine(arguments: dict[str, Any]) -> Application:
    """A model; Serve's options come with the configuration."""
    return engine_with(arguments)
