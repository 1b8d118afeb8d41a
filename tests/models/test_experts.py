"""Expert layers in the implementation that transformers takes by default (sort, grouped products, inverse order)."""

from __future__ import annotations

import pytest
import torch

import longstraw
from longstraw import ops
from tests.models import zoo
from tests.steps import STEPS
from tests.sweeps import sweep


@pytest.mark.parametrize("group", sweep([1, 3], always=[1]))
@pytest.mark.parametrize(
    "name", sweep(["qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3"], always=["gpt_oss", "deepseek_v3"])
)
def test_default_expert_dispatch_equals_eager(name: str, group: int) -> None:
    model = zoo.build(name, dtype=torch.float32)
    model.config._experts_implementation = "grouped_mm"
    step = STEPS["grpo"]
    inputs = step.inputs(model, group=group, dtype=torch.float32)
    parity = longstraw.verify(step.function, model, **inputs, options={"span_tokens": 7, "page_tokens": 4})
    assert parity.relative_l2 < 1e-5 and parity.worst[1] < 1e-4 and not parity.missing, str(parity)


@pytest.mark.parametrize("group", sweep([1, 3], always=[3]))
def test_experts_run_on_tiles_of_tokens(monkeypatch: pytest.MonkeyPatch, group: int) -> None:
    """Sorted, multiplied and put back a tile at a time, positions among the tile's tokens counted anew."""
    monkeypatch.setattr(ops, "TILE_BYTES", 20000)
    model = zoo.build("mixtral", dtype=torch.float32)
    model.config._experts_implementation = "grouped_mm"
    step = STEPS["grpo"]
    inputs = step.inputs(model, group=group, dtype=torch.float32)
    lowered = longstraw.explain(step.function, model, **inputs).programs[0].step.branches[0].relay
    tiles = [module for name, module in lowered.named_children() if name.startswith("wide_")]
    assert any(n.target is torch.ops.aten.sort.default for tile in tiles for n in tile.graph.nodes)  # type: ignore[union-attr]
    parity = longstraw.verify(step.function, model, **inputs, options={"span_tokens": 7, "page_tokens": 4})
    assert parity.relative_l2 < 1e-5 and parity.worst[1] < 1e-4 and not parity.missing, str(parity)
