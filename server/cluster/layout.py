"""Translates cluster.yaml for Ray Serve: one application per model, in Serve's terms, without importing Ray."""

from typing import Any

from server.cluster.file import Autoscaling, ClusterFile, Model, replica_arguments, version_of
from server.config.render import ENGINE_MODULE

APPLICATIONS = "server.cluster.on_ray.application"
DIRECTORY = "voltserve"  # the application of the directory; those of models are voltserve-NAME
DEPLOYMENT = "engine"  # the deployment in each model's application
POLICY = "server.cluster.on_ray.scaling:by_load"
STOPPING = 30.0  # seconds beyond the drain in which a replica must have ended


def directory_config(file: ClusterFile, module: str = ENGINE_MODULE) -> dict[str, Any]:
    """The directory's content for gateways and later updates: each model's names, fewest replicas, and version."""
    models = [
        {
            "name": one.name,
            "served": list(one.served),
            "least": one.least,
            "version": version_of(replica_arguments(file, one, module)),
        }
        for one in file.models
    ]
    return {"models": models}


def deployment_options(model: Model, extra: int = 0) -> dict[str, Any]:
    """Serve's options for a model's replicas.

    Args:
        model: the model.
        extra: replicas beyond those wanted, while an update replaces them one by one.
    """
    own_gpus = model.gpus if model.nodes == 1 else 0
    options: dict[str, Any] = {
        "name": DEPLOYMENT,
        "ray_actor_options": {"num_cpus": model.cpus, "num_gpus": own_gpus, "resources": dict(model.resources)},
        "health_check_period_s": 2.0,
        "health_check_timeout_s": 10.0,
        "graceful_shutdown_wait_loop_s": 0.1,
        "graceful_shutdown_timeout_s": model.drain + STOPPING,
    }
    if model.per_node is not None:
        options["max_replicas_per_node"] = model.per_node
    wanted = model.autoscaling or Autoscaling(min=model.least, max=model.least, requests_per_replica=1)
    # Also where the number is fixed: Serve takes no figures from replicas, and fails over it, without this.
    options["autoscaling_config"] = {
        "min_replicas": wanted.min + extra,
        "max_replicas": wanted.max + extra,
        "target_ongoing_requests": wanted.requests_per_replica,
        "upscale_delay_s": wanted.up_after,
        "downscale_delay_s": wanted.down_after,
        "metrics_interval_s": 1.0,
        "look_back_period_s": 5.0,
        "policy": {"policy_function": POLICY},
    }
    return options


def serve_config(file: ClusterFile) -> dict[str, Any]:
    """The same as `serveConfigV2` of a KubeRay RayService, which then does what `on_ray.apply` does elsewhere."""
    directory = {
        "name": DIRECTORY,
        "import_path": f"{APPLICATIONS}:directory",
        "route_prefix": None,
        "deployments": [{"name": "directory", "user_config": directory_config(file)}],
    }
    models = [
        {
            "name": one.application,
            "import_path": f"{APPLICATIONS}:engine",
            "route_prefix": None,
            "args": replica_arguments(file, one, ENGINE_MODULE),
            "deployments": [deployment_options(one)],
        }
        for one in file.models
    ]
    return {"applications": [directory, *models]}
