"""The files that a cluster is deployed from say what the code reads."""

from pathlib import Path

import pytest
import yaml

from serving.config import Config, ConfigError, load_config

ray_schema = pytest.importorskip("ray.serve.schema")

SERVE_YAML = Path(__file__).parents[2] / "deploy" / "serve.yaml"


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
