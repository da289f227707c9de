"""Compiles every Triton kernel to machine code, for which no GPU is needed.

    python -m tests.compiled_kernels 80 90

A process of its own, because Triton's interpreter is on or off for a whole process. Prints a line
of JSON per kernel: its name, the architecture, and whether tensor cores are used.
"""

import json
import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from workers.cuda import kernels

INTEGERS = ("size", "split", "num_splits", "page_size")
HEADS = {"HEADS": 32, "KV_HEADS": 8, "HALF": 64, "BLOCK": 64}
LAUNCHES: list[tuple[Any, dict[str, int | bool]]] = [
    (kernels._norm, {"ADD": False, "BLOCK": 4096}),
    (kernels._norm, {"ADD": True, "BLOCK": 4096}),
    (kernels._silu_mul, {"BLOCK": 1024}),
    (kernels._rotate_and_store, {**HEADS, "NORMED": False}),
    (kernels._rotate_and_store, {**HEADS, "NORMED": True}),
    (kernels._attend_split, {"GROUP": 3, "ROWS": 16, "DIM": 64, "DIMS": 64, "TILE": 64}),
    (kernels._join_splits, {"DIM": 80, "DIMS": 128}),
]


def signature(function: Any, constants: dict[str, int | bool], dtype: str) -> dict[str, str]:
    kinds = {"eps": "fp32", "scale": "fp32", "slots": "*i64"}
    kinds |= dict.fromkeys(("contexts", "pages"), "*i32")
    kinds |= dict.fromkeys(("cos", "sin", "part", "part_max", "part_sum"), "*fp32")
    kinds |= dict.fromkeys(constants, "constexpr")
    kinds |= dict.fromkeys(INTEGERS, "i32")
    strides = {name: "i32" for name in function.arg_names if name.endswith("_stride")}
    return {name: (kinds | strides).get(name, f"*{dtype}") for name in function.arg_names}


def compiled(function: Any, constants: dict[str, int | bool], dtype: str, capability: int) -> Any:
    source = ASTSource(
        fn=function,
        signature=signature(function, constants, dtype),
        constexprs={(function.arg_names.index(name),): constants[name] for name in constants},
    )
    return triton.compile(source, target=GPUTarget("cuda", capability, 32))


if __name__ == "__main__":
    for capability in map(int, sys.argv[1:]):
        for function, constants in LAUNCHES:
            code = compiled(function, constants, "bf16", capability).asm
            told = {"kernel": function.__name__, "capability": capability}
            told |= {"bytes": len(code["cubin"]), "mma": "mma" in code["ptx"]}
            print(json.dumps(told), flush=True)
