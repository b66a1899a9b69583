"""`baton models` lists the served architectures, and checks one model."""

import json

import pytest

from deploy import models
from model.architectures.table import ARCHITECTURES, UNSUPPORTED_ARCHITECTURES
from tests.model.test_against_transformers import CASES
from tests.model.test_config import LLAMA


def test_each_architecture_names_the_test_that_proves_it(capsys):
    assert (
        models.main(["--revision", "main"]) == 1
        and "--model" in capsys.readouterr().err
    )
    assert models.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name, declared in ARCHITECTURES.items():
        assert CASES[declared.test_case][0] == name
        (line,) = [line for line in lines if line.startswith(f"{name} ")]
        assert line.endswith(f"-k '[{declared.test_case}]'")
    assert {near for near, _ in UNSUPPORTED_ARCHITECTURES.values()} <= set(
        ARCHITECTURES
    )
    assert not set(UNSUPPORTED_ARCHITECTURES) & set(ARCHITECTURES)


@pytest.mark.parametrize(
    ("change", "overrides", "status", "expected"),
    [
        ({}, {}, 0, "served: LlamaForCausalLM, 2 layers"),
        (
            {"architectures": ["Llama4ForCausalLM"]},
            {},
            1,
            "nearest that is served is LlamaForC",
        ),
        (
            {"architectures": ["GptOssForCausalLM"], "num_hidden_layers": 3},
            {"num_local_experts": 4, "num_experts_per_tok": 2},
            0,
            "served: GptOssForCausalLM, 3 layers (2 see 128 tokens), 4 experts",
        ),
        ({"hidden_act": "mish"}, {}, 1, 'hidden_act "mish" is not supported'),
        ({"hidden_act": "mish"}, {"hidden_act": "silu"}, 0, "served: Llama"),
    ],
)
def test_model_is_supported_or_the_reason_is_printed(
    tmp_path, capsys, change, overrides, status, expected
):
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **change}))
    argv = [f"--hf-overrides={json.dumps(overrides)}"] if overrides else []
    assert models.main([f"--model={tmp_path}", *argv]) == status
    assert expected in "".join(capsys.readouterr())
