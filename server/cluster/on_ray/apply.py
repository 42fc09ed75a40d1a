"""`python -m server.cluster.on_ray.apply`: makes Ray Serve run a cluster.yaml, and returns when it does.

stdin: the file as JSON and the engine's module. stdout: lines of JSON, each a `decision` or a model's `progress`. Exit
code 1 where a model does not start.
"""

import json
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import ray
from ray import serve
from ray.serve.schema import ApplicationStatus

from server.cluster.file import ClusterFile, Model, replica_arguments, version_of
from server.cluster.layout import DEPLOYMENT, DIRECTORY, deployment_options, directory_config
from server.cluster.on_ray import application
from server.cluster.on_ray.connect import connect, own_output, shortened

POLL = 0.5  # seconds
ANSWER_LIMIT = 10.0  # seconds

Say = Callable[[Any], None]


def main() -> None:
    """Deploys and updates the file's models, and deletes all others."""
    given = json.loads(sys.stdin.readline())
    file, module = ClusterFile.model_validate(given["file"]), given["module"]
    say = own_output()
    connect()
    serve.start(proxy_location="Disabled")  # requests arrive through our gateway
    before = _versions()
    surging = _surging(file, module, before, say)
    _update_directory(file, module, before)
    for name in set(serve.status().applications) - {DIRECTORY, *(model.application for model in file.models)}:
        if name.startswith(f"{DIRECTORY}-"):
            serve.delete(name, _blocking=False)
            say({"decision": ("application", f"{name} deleted", "its model is not in the file")})
    failed = _roll(file, file.models, module, surging, say)
    # A model that failed keeps its extra replica: without it Serve would stop a working one.
    failed |= _roll(file, [one for one in file.models if one.name in surging.keys() - failed], module, {}, say)
    new = {one["name"]: one["version"] for one in directory_config(file, module)["models"] if one["name"] not in failed}
    _update_directory(file, module, {**before, **new})
    raise SystemExit(1 if failed else 0)


def _versions() -> dict[str, str]:
    """Each model's last version that started."""
    if DIRECTORY not in serve.status().applications:
        return {}
    handle = serve.get_deployment_handle("directory", DIRECTORY)
    models = handle.configured.remote().result(timeout_s=ANSWER_LIMIT)["models"]
    return {one["name"]: one["version"] for one in models}


def _update_directory(file: ClusterFile, module: str, versions: Mapping[str, str]) -> None:
    """Gives the directory the models, and their versions that started."""
    config = directory_config(file, module)
    for one in config["models"]:
        one["version"] = versions.get(one["name"], "")
    _run({DIRECTORY: application.directory_with(user_config=config)})


def _run(targets: Mapping[str, serve.Application]) -> None:
    """Has Serve run these applications, without waiting for them."""
    runs = [serve.RunTarget(target, name=name, route_prefix=None) for name, target in targets.items()]
    serve.run_many(runs, wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)


def _roll(file: ClusterFile, models: Iterable[Model], module: str, surging: Mapping[str, int], say: Say) -> set[str]:
    """Deploys these models, with the extra replicas of `surging`, and waits. Returns the models that do not start."""
    targets = {}
    for model in models:
        arguments = replica_arguments(file, model, module)
        options = deployment_options(model, surging.get(model.name, 0))
        targets[model.application] = application.engine_with(arguments, version=version_of(arguments), **options)
    if not targets:
        return set()
    _run(targets)
    return {name.removeprefix(f"{DIRECTORY}-") for name in _wait(targets, say)}


def _wait(names: Collection[str], say: Say) -> list[str]:
    """Waits until Serve says of each application that it runs, or cannot; returns those that cannot."""
    shown: dict[str, str] = {}
    while True:
        found = serve.status().applications
        ended = {ApplicationStatus.RUNNING, ApplicationStatus.DEPLOY_FAILED}
        for name in names:
            if name not in found:
                continue
            engine = found[name].deployments.get(DEPLOYMENT)
            message = shortened(found[name].message or (engine.message if engine else ""))
            text = f"{found[name].status.value}{': ' if message else ''}{message}"
            if shown.get(name) != text:
                shown[name] = text
                say({"progress": (name, text)})
        if all(name in found and found[name].status in ended for name in names):
            return [name for name in names if found[name].status is not ApplicationStatus.RUNNING]
        time.sleep(POLL)


def _surging(file: ClusterFile, module: str, before: Mapping[str, str], say: Say) -> dict[str, int]:
    """The models whose update takes one extra replica, so that their number never drops."""
    free = ray.available_resources()
    surging = {}
    for model in file.models:
        version = version_of(replica_arguments(file, model, module))
        if before.get(model.name, "") in {"", version}:
            continue
        choice, reason = _surge(model, free)
        say({"decision": (f"update of {model.name}", choice, reason)})
        if choice == _MORE:
            surging[model.name] = 1
    return surging


_MORE, _IN_PLACE = "one replica more meanwhile", "one replica after the other"


def _surge(model: Model, free: Mapping[str, float]) -> tuple[str, str]:
    """How to update a model, and why."""
    if not model.surge:
        return _IN_PLACE, "surge: false"
    if model.autoscaling is not None and model.autoscaling.min > 1:
        return _IN_PLACE, f"at least {model.autoscaling.min} replicas run, of which all but one serve on"
    needs = {"CPU": model.cpus, "GPU": float(model.gpus * model.nodes), **model.resources}
    lacking = [f"{name} {free.get(name, 0):g} of {need:g}" for name, need in needs.items() if free.get(name, 0) < need]
    if lacking:
        return _IN_PLACE, f"no room for one more: free are {', '.join(lacking)}"
    return _MORE, "as many as before serve at every moment"


if __name__ == "__main__":
    main()
