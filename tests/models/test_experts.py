"""Expert layers in the implementation that transformers takes by default (sort, grouped products, inverse order)."""

from __future__ import annotations

import pytest
import torch

import longstraw
from tests.models import zoo
from tests.steps import STEPS


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3"])
def test_default_expert_dispatch_equals_eager(name: str) -> None:
    model = zoo.build(name, dtype=torch.float32)
    model.config._experts_implementation = "grouped_mm"
    step = STEPS["grpo"]
    inputs = step.inputs(model, dtype=torch.float32)
    parity = longstraw.verify(step.function, model, **inputs, options={"span_tokens": 7, "page_tokens": 4})
    assert parity.relative_l2 < 1e-5 and parity.worst[1] < 1e-4 and not parity.missing, str(parity)
