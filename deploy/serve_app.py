"""What a Serve config file imports: the application, built from the file's ``args``."""

from typing import Any

from ray import serve

from serving.config import load_config
from serving.deployments.app import build_app


def build(args: dict[str, Any]) -> serve.Application:
    """``args`` are the keys of ``serving.config.Config``; ``device: cuda`` gives a GPU each."""
    config = load_config(overrides=args)
    return build_app(config, is_local=False, num_gpus=1.0 if config.device == "cuda" else 0.0)
