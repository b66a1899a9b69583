"""Kernels that other processes compile before a rank needs them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.worker.compile.processes import KERNEL_MODULES
from engine.worker.compile.shadow_model import first_layers
from model.config import parse_config
from tests.model.test_real_configs import MODELS

_ROOT = Path(__file__).parents[2]
_COMPILE_TWICE = """
import sys
from triton.backends.compiler import GPUTarget
from engine.worker.compile.processes import KernelCompilers, KernelRequest

if __name__ == "__main__":
    signature = {"gate_up": "*bf16", "out": "*bf16", "width": "i32"}
    request = KernelRequest(
        module="model.fused_kernels",
        name="_silu_and_mul",
        signature={**signature, "COLUMNS": "constexpr"},
        constants={(3,): 256},
        attributes={},
        options={"num_warps": 4},
        target=GPUTarget("cuda", 90, 32),
    )
    compilers = KernelCompilers(2)
    compilers.submit(request)
    compilers.submit(request._replace(name="_missing"))
    print(compilers.wait())
    compilers.close()
"""


def test_every_module_with_kernels_is_listed() -> None:
    """If a module were not listed, the names of its cached kernels would depend on the
    order of launches.
    """
    listed = {name.replace(".", "/") + ".py" for name in KERNEL_MODULES}
    modules_with_kernels = {
        str(path.relative_to(_ROOT))
        for package in ("attention", "engine", "kvcache", "model")
        for path in (_ROOT / package).rglob("*.py")
        if "triton.jit" in path.read_text() and path.parent.name != "compile"
    }
    assert modules_with_kernels == listed


def test_kernels_are_compiled_into_the_cache(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    program = tmp_path / "program.py"
    program.write_text(_COMPILE_TWICE)
    cache = tmp_path / "cache"
    environ = {
        **os.environ,
        "PYTHONPATH": str(_ROOT),
        "TRITON_CACHE_DIR": str(cache),
        "TRITON_INTERPRET": "0",
    }
    result = subprocess.run(
        [sys.executable, program], env=environ, capture_output=True, text=True
    )
    assert result.stdout.strip() == "1", result.stderr
    assert [path.name for path in cache.rglob("*.cubin")] == ["_silu_and_mul.cubin"]


@pytest.mark.parametrize(
    ("model", "num_layers"),
    [
        pytest.param("phi-4", 1, id="all layers are alike"),
        pytest.param("gpt-oss-20b", 2, id="every second layer has a window"),
        pytest.param("gemma-3-4b", 6, id="every sixth layer has none"),
        pytest.param("DeepSeek-V3", 4, id="three dense layers, then experts"),
    ],
)
def test_shadow_has_every_kind_of_layer(model: str, num_layers: int) -> None:
    config = first_layers(parse_config(MODELS[model][1]))
    assert config.num_layers == num_layers
