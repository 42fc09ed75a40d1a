from types import SimpleNamespace

import pytest

from server.cluster.file import ClusterFile
from server.cluster.layout import deployment_options, directory_config, serve_config
from server.cluster.on_ray.scaling import by_load

FILE = ClusterFile.model_validate(
    {
        "schema": 1,
        "models": [
            {"name": "a", "flags": {"model": "/a", "served-model-name": ["a", "b"]}, "replicas": 2, "gpus": 4},
            {
                "name": "c",
                "flags": {"model": "/c"},
                "autoscaling": {"min": 1, "max": 3, "requests_per_replica": 8, "up_after": 5, "down_after": 60},
                "gpus": 2,
                "nodes": 2,
                "per_node": 1,
            },
        ],
    }
)


def test_a_fixed_number_of_replicas_is_autoscaling_between_equal_limits() -> None:
    options = deployment_options(FILE.models[0])
    scaling = options["autoscaling_config"]
    assert (scaling["min_replicas"], scaling["max_replicas"]) == (2, 2)
    assert options["ray_actor_options"] == {"num_cpus": 1, "num_gpus": 4, "resources": {}}
    assert "max_replicas_per_node" not in options


def test_limits_and_delays_are_passed_on_and_a_split_model_takes_its_gpus_itself() -> None:
    options = deployment_options(FILE.models[1])
    scaling = options["autoscaling_config"]
    assert (scaling["min_replicas"], scaling["max_replicas"], scaling["target_ongoing_requests"]) == (1, 3, 8)
    assert (scaling["upscale_delay_s"], scaling["downscale_delay_s"]) == (5, 60)
    assert options["ray_actor_options"]["num_gpus"] == 0
    assert options["max_replicas_per_node"] == 1


def test_an_update_may_have_one_replica_more() -> None:
    scaling = deployment_options(FILE.models[1], extra=1)["autoscaling_config"]
    assert (scaling["min_replicas"], scaling["max_replicas"]) == (2, 4)


def test_a_replica_has_its_drain_before_ray_ends_it() -> None:
    assert deployment_options(FILE.models[0])["graceful_shutdown_timeout_s"] > FILE.models[0].drain


def test_the_directory_knows_names_and_versions() -> None:
    models = directory_config(FILE)["models"]
    assert [(one["name"], one["served"]) for one in models] == [("a", ["a", "b"]), ("c", ["/c"])]
    assert len({one["version"] for one in models}) == 2


def test_kuberay_gets_the_same_applications() -> None:
    directory, first, second = serve_config(FILE)["applications"]
    assert directory["deployments"][0]["user_config"] == directory_config(FILE)
    assert [one["name"] for one in (directory, first, second)] == ["voltserve", "voltserve-a", "voltserve-c"]
    assert first["args"]["flags"]["model"] == "/a"
    assert first["deployments"] == [deployment_options(FILE.models[0])]


@pytest.mark.parametrize(
    ("loads", "wanted"),
    [({}, 2.0), ({"x": 0.0, "y": 0.0}, 0.0), ({"x": 8.0, "y": 16.0}, 3.0), ({"x": 9.0}, 1.125)],
)
def test_so_many_replicas_as_the_requests_fill(loads: dict[str, float], wanted: float) -> None:
    config = SimpleNamespace(get_target_ongoing_requests=lambda: 8.0)
    context = SimpleNamespace(aggregated_metrics={"load": loads} if loads else None, config=config)
    context.target_num_replicas = 2
    assert by_load(context) == (wanted, {})
