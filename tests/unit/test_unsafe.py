"""Nothing of ours turns bytes from a socket or a file into code."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("serving", "workers", "kvtransfer", "protos", "deploy", "bench")
MODULES = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
CALLS = {
    *("eval", "exec", "recv_pyobj", "send_pyobj", "loads_pickle", "unsafe_load"),
    *("send_object_list", "recv_object_list", "broadcast_object_list", "all_gather_object"),
    *("gather_object", "scatter_object_list"),
}
DOTTED = {"yaml.load", "yaml.full_load", "yaml.unsafe_load", "torch.load", "os.system"}
FILES = [p for package in PACKAGES for p in sorted((ROOT / package).rglob("*.py"))]


def unsafe(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.split(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in MODULES:
            yield str(node.module)
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name in DOTTED | CALLS or name.rpartition(".")[2] in CALLS - {"eval", "exec"}:
                yield name
            if any(k.arg == "shell" and ast.unparse(k.value) == "True" for k in node.keywords):
                yield f"{name}(shell=True)"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_unsafe_loader_is_used(path: Path) -> None:
    """FAULTS 115."""
    assert not list(unsafe(ast.parse(path.read_text())))


def test_the_gate_would_see_them() -> None:
    lines = ("import pickle", "torch.load(f)", "yaml.load(f)", "eval(x)", "socket.recv_pyobj()")
    for line in (*lines, "dist.broadcast_object_list(x)", "run(x, shell=True)"):
        assert list(unsafe(ast.parse(line))), line
