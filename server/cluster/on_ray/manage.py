"""`python -m server.cluster.on_ray.manage status|stop`: what Ray Serve says of our applications; ends them."""

import sys
from typing import Any

import ray
from ray import serve

from server.cluster.layout import DEPLOYMENT, DIRECTORY
from server.cluster.on_ray.connect import connect, own_output, shortened

ANSWER_LIMIT = 10.0  # seconds


def main() -> None:
    """Does as the command line says; prints one JSON object."""
    what = sys.argv[1]
    say = own_output()
    connect()
    applications = serve.status().applications
    models = [name for name in applications if name.startswith(f"{DIRECTORY}-")]
    ours = [*models, *({DIRECTORY} & applications.keys())]
    if what == "stop":
        for name in ours:
            serve.delete(name, _blocking=False)
        say({"stopped": ours})
        return
    found: dict[str, Any] = {"replicas": [], "failures": {}}
    if DIRECTORY in ours:
        found = serve.get_deployment_handle("directory", DIRECTORY).look.remote().result(timeout_s=ANSWER_LIMIT)
    say({"nodes": _nodes(), "models": [_model(name, applications[name], found) for name in models]})


def _nodes() -> list[dict[str, Any]]:
    return [
        {"host": node["NodeManagerAddress"], "alive": node["Alive"], "resources": node["Resources"]}
        for node in ray.nodes()
    ]


def _model(name: str, application: Any, found: dict[str, Any]) -> dict[str, Any]:
    model = name.removeprefix(f"{DIRECTORY}-")
    engine = application.deployments.get(DEPLOYMENT)
    return {
        "name": model,
        "status": application.status.value,
        "message": shortened(application.message or (engine.message if engine else "")),
        "replicas": engine.replica_states if engine else {},
        "hosts": sorted(one["host"] for one in found["replicas"] if one["model"] == model),
        "last_failure": found["failures"].get(model, ""),
    }


if __name__ == "__main__":
    main()
