"""The files that a cluster is deployed from say what the code reads."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from serving.cli import app as cli
from serving.config import Config, ConfigError, load_config

ray_schema = pytest.importorskip("ray.serve.schema")

DEPLOY = Path(__file__).parents[2] / "deploy"
SERVE_YAML = DEPLOY / "serve.yaml"


def test_the_serve_config_is_valid_for_ray_and_for_us() -> None:
    from deploy.serve_app import build

    values = yaml.safe_load(SERVE_YAML.read_text())
    schema = ray_schema.ServeDeploySchema.model_validate(values)
    (application,) = schema.applications
    assert application.import_path == "deploy.serve_app:build"
    assert isinstance(load_config(overrides=application.args), Config)
    assert build(application.args) is not None


def test_a_wrong_key_in_the_serve_config_is_named() -> None:
    from deploy.serve_app import build

    with pytest.raises(ConfigError, match="did you mean mixed"):
        build({"mixd": 2})


def load(name: str) -> list[Any]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


def check_serve_config(values: dict[str, Any]) -> Config:
    schema = ray_schema.ServeDeploySchema.model_validate(values)
    (application,) = schema.applications
    assert application.import_path == "deploy.serve_app:build"
    return load_config(overrides=application.args)


def test_the_ray_service_serves_what_its_nodes_can_hold() -> None:
    service, policy = load("rayservice.yaml")
    assert (service["apiVersion"], service["kind"]) == ("ray.io/v1", "RayService")
    spec = service["spec"]
    config = check_serve_config(yaml.safe_load(spec["serveConfigV2"]))
    assert config.is_guarded and config.placement == "labelled"
    cluster = spec["rayClusterConfig"]
    assert cluster["rayVersion"] == pinned_ray()
    offered = {}
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        resources = json.loads(json.loads(group["rayStartParams"]["resources"]))
        (pool,) = resources
        offered[pool] = group.get("replicas", 1)
        (container,) = group["template"]["spec"]["containers"]
        volumes = {volume["name"] for volume in group["template"]["spec"]["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
        if "groupName" in group:
            assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
            assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
            assert group["template"]["spec"]["terminationGracePeriodSeconds"] > config.drain_s
    assert offered == {
        "evenflow_gateway": 1,
        "evenflow_prefill": config.prefill,
        "evenflow_decode": config.decode,
    }
    assert policy["kind"] == "NetworkPolicy"


def pinned_ray() -> str:
    project = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text())["project"]
    (pin,) = [d for d in project["dependencies"] if d.startswith("ray[")]
    return pin.partition("==")[2]


def test_labelled_pools_ask_for_nodes_that_offer_them() -> None:
    from serving.deployments.app import build_app

    config = Config(placement="labelled", prefill=1, mixed=0, decode=1)
    app = build_app(config, is_local=False, num_gpus=1.0)
    options = app._bound_deployment.ray_actor_options
    assert options["resources"] == {"evenflow_gateway": 0.001}
    pools = app._bound_deployment.init_args[1]
    for role, bound in pools.items():
        resources = bound._bound_deployment.ray_actor_options["resources"]
        assert resources == {f"evenflow_{role}": 0.001}


def test_the_cluster_of_own_machines_is_valid_for_ray() -> None:
    util = pytest.importorskip("ray.autoscaler._private.util")
    (values,) = load("cluster.yaml")
    util.validate_config(util.prepare_config(values))
    commands = [*values["head_start_ray_commands"], *values["worker_start_ray_commands"]]
    assert all("RAY_AUTH_MODE=token" in c for c in commands if "ray start" in c)
    assert "--dashboard-host=127.0.0.1" in commands[1]


def test_compose_publishes_on_loopback_and_mounts_what_exists() -> None:
    (values,) = load("compose.yaml")
    for service in values["services"].values():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))
        for mount in service.get("volumes", ()):
            source = mount.split(":")[0]
            assert source in values["volumes"] or (DEPLOY / source).exists(), mount
    command = values["services"]["evenflow"]["command"]
    known = CliRunner().invoke(cli, ["serve", "--help"], terminal_width=200).output
    assert command[0] == "serve" and all(f in known for f in command if f.startswith("--"))
    (scraped,) = load("prometheus.yaml")
    assert (DEPLOY / scraped["rule_files"][0]).exists()
    (job,) = scraped["scrape_configs"]
    assert job["static_configs"][0]["targets"] == ["evenflow:8000"]
    (source,) = load("grafana/provisioning/datasources/prometheus.yaml")
    assert source["datasources"][0]["url"] == "http://prometheus:9090"


def test_the_image_copies_every_package() -> None:
    lines = (DEPLOY / "Dockerfile").read_text().splitlines()
    copied = [part for line in lines if line.startswith("COPY") for part in line.split()[1:-1]]
    assert all((DEPLOY.parent / source).exists() for source in copied)
    project = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text())
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert set(packages) <= set(copied)
    assert "USER ray" in lines
