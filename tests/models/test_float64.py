"""Models of transformers compute in float64 throughout, eager and compiled, and eager by other means agrees."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from tests.models import float64, zoo

# Norms with and without a float32 weight, routers, sinks, soft caps, biases, scaled rotary embeddings.
NAMES = ("llama", "gemma2", "gpt_oss", "deepseek_v3", "qwen3_moe", "bloom", "llama-yarn")
NARROW = (torch.float32, torch.complex64, torch.bfloat16, torch.float16)


class Narrow(TorchDispatchMode):
    """The operators that gave a tensor of less than double precision."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if has_narrow(result):
            self.found.append(str(func))
        return result


def has_narrow(value: object) -> bool:
    return any(isinstance(leaf, Tensor) and leaf.dtype in NARROW for leaf in pytree.tree_leaves(value))


def build(name: str, attention: str = "sdpa") -> nn.Module:
    name, changed = zoo.VARIANTS.get(name, (name, {}))
    config = zoo.config_of(name, **changed)
    config._experts_implementation = "batched_mm"
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64, attn_implementation=attention)
    zoo.randomise(model, seed=0)
    return model.eval()


@pytest.fixture
def inside(request: pytest.FixtureRequest) -> Iterator[None]:
    name = request.getfixturevalue("name")
    with float64.float64_inside(zoo.VARIANTS[name][0] if name in zoo.VARIANTS else name):
        yield


def tokens() -> Tensor:
    return torch.randint(2, zoo.VOCAB, (2, 12), generator=torch.Generator().manual_seed(0))


def logits(model: nn.Module) -> Tensor:
    return model(input_ids=tokens(), use_cache=False).logits


def distance(left: Tensor, right: Tensor) -> float:
    return float((left - right).detach().norm() / right.detach().norm())


@pytest.mark.usefixtures("inside")
@pytest.mark.parametrize("name", NAMES)
def test_no_operator_of_eager_computes_in_float32(name: str) -> None:
    model = build(name, attention="eager")
    assert not has_narrow([*model.parameters(), *model.buffers()])
    with Narrow() as narrow:
        logits(model).square().mean().backward()
    assert not narrow.found


@pytest.mark.usefixtures("inside")
@pytest.mark.parametrize("name", ["llama", "gpt_oss", "deepseek_v3"])
def test_no_node_of_a_traced_graph_is_float32(name: str) -> None:
    model = build(name, attention="eager")
    seen, found = 0, []

    def record(graph_module, example_inputs):
        nonlocal seen
        seen += len(graph_module.graph.nodes)
        found.extend(node for node in graph_module.graph.nodes if has_narrow(node.meta.get("example_value")))
        return graph_module.forward

    torch._dynamo.reset()
    compiled = torch.compile(logits, backend=record)(model)
    assert seen and not found
    assert distance(compiled, logits(model)) < 1e-14


@pytest.mark.usefixtures("inside")
@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "glm4"])
def test_kinds_of_attention_agree(name: str) -> None:
    written, fused = build(name, attention="eager"), build(name, attention="sdpa")
    assert written.config._attn_implementation != fused.config._attn_implementation
    assert distance(logits(written), logits(fused)) < 1e-14


def test_restore_gives_the_original_back() -> None:
    model = build("qwen3_moe")
    with Narrow() as narrow:
        outside = logits(model)
    assert narrow.found

    with float64.float64_inside("qwen3_moe"):
        float64.apply(float64.for_model("qwen3_moe"))  # a second time changes nothing
        assert 1e-10 < distance(outside, logits(build("qwen3_moe"))) < 1e-5
    assert torch.equal(logits(model), outside)


def test_a_builtin_of_the_same_name_is_left_alone() -> None:
    def both(x, limit="-inf"):
        return x.float().to(torch.float32), float(limit), [torch.float for _ in range(1)]

    code = float64.in_float64(both.__code__)
    rewritten = type(both)(code, {**both.__globals__, "double": float}, None, both.__defaults__)
    value, limit, dtypes = rewritten(torch.ones(1, dtype=torch.bfloat16))
    assert value.dtype == torch.float64 and limit == -float("inf") and dtypes == [torch.float64]
    assert float64.in_float64(code) is code
