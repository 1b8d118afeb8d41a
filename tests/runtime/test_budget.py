"""The memory law and the plans that it lets through: what is planned is what a step takes, counted on live tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import sympy
import torch
from torch import Tensor, nn

import longstraw
from longstraw import backend
from longstraw.errors import BudgetTooSmall, OptionsError
from longstraw.options import Options
from longstraw.runtime import memory_law as law
from longstraw.runtime import step as step_module
from longstraw.runtime.budget import Budget, Estimate
from longstraw.runtime.live_bytes import LiveBytes
from longstraw.runtime.plan import Plan, Shape
from tests import small
from tests.models import zoo
from tests.steps import STEPS
from tests.sweeps import sweep

STEP = STEPS["grpo"]


class Measured:
    """Counts the live bytes of one step with a budget, weights and inputs among them, and keeps its plan."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        torch._dynamo.reset()
        self.live = LiveBytes()
        self.estimate: Estimate | None = None
        run_step, plan = backend.run_step, step_module._plan

        def counted(*args: Any, **kwargs: Any) -> Any:
            with self.live:
                return run_step(*args, **kwargs)

        def planned(budget: Budget, *args: Any) -> None:
            plan(budget, *args)
            (self.estimate,) = budget._chosen.values()

        monkeypatch.setattr(backend, "run_step", counted)
        monkeypatch.setattr(step_module, "_plan", planned)

    def __call__(
        self, model: nn.Module, inputs: dict[str, Any], step: Callable[..., Tensor] = STEP.function, **options: Any
    ) -> tuple[int, Estimate]:
        compiled = torch.compile(step, backend="longstraw", options=options)
        given = [*model.parameters(), *(x for x in inputs.values() if isinstance(x, Tensor))]
        given += [p.grad for p in model.parameters() if p.grad is not None]
        loss = compiled(model, **inputs)
        with self.live:
            if loss.requires_grad:
                loss.backward()
        assert self.estimate is not None
        return self.live.peak + sum(x.numel() * x.element_size() for x in given), self.estimate


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Measured:
    return Measured(monkeypatch)


@pytest.mark.parametrize(
    ("name", "prompt", "response", "group", "budget"),
    sweep(
        [
            ("llama", 400, 30, 6, "4MiB"),
            ("llama", 40, 90, 2, "64MiB"),
            ("gemma3_text", 300, 20, 4, "6MiB"),
            ("mixtral", 200, 20, 4, "64MiB"),
            ("qwen3_5_text", 300, 20, 4, "6MiB"),
            ("glm_moe_dsa", 300, 20, 4, "12MiB"),
            ("deepseek_v2", 300, 20, 4, "12MiB"),
        ],
        always=[("llama", 400, 30, 6, "4MiB")],
    ),
)
def test_what_a_step_takes_is_what_was_planned(
    measured: Measured, name: str, prompt: int, response: int, group: int, budget: str
) -> None:
    model = zoo.build(name)
    inputs = STEP.inputs(model, prompt=prompt, response=response, group=group)
    taken, estimate = measured(model, inputs, memory_budget=budget)
    bound = Options(memory_budget=budget).memory_budget
    assert isinstance(bound, int)
    assert estimate.peak <= bound
    assert 0.6 <= taken / estimate.peak <= 1.1


def rows_of_a_tree(model: nn.Module, ids: Tensor, prompt: int) -> Tensor:
    logits = model(input_ids=ids, use_cache=False).logits[:, prompt - 1 : -1]
    return torch.log_softmax(logits, -1).gather(-1, ids[:, prompt:, None]).mean()


@pytest.mark.parametrize(
    "kind",
    sweep(
        ["tree", "equal rows", "one row", "no grad", "accumulated", "nothing shared", "one token shared"],
        always=["tree", "nothing shared"],
    ),
)
def test_what_steps_of_other_shapes_take_is_what_was_planned(measured: Measured, kind: str) -> None:
    model = zoo.build("llama")
    ids = torch.randint(3, 60, (1 if kind == "one row" else 4, 420))
    ids[:, :200] = ids[:1, :200].clone()
    ids[1::2, :400] = ids[::2, :400].clone() if len(ids) > 1 else ids[1::2, :400]
    if kind.endswith("shared"):
        ids = torch.randint(3, 60, (4, 420))
        ids[:, 0] = 5 if kind == "one token shared" else torch.arange(4)
    if kind == "equal rows":
        ids = ids[:1].repeat(4, 1)
    if kind == "accumulated":
        rows_of_a_tree(model, ids, 200).backward()
    with torch.set_grad_enabled(kind != "no grad"):
        taken, estimate = measured(model, {"ids": ids, "prompt": 200}, rows_of_a_tree, memory_budget="64MiB")
    assert 0.6 <= taken / estimate.peak <= 1.1


@pytest.fixture(scope="module")
def found() -> tuple[nn.Module, dict[str, Any], longstraw.Explanation]:
    model = zoo.build("llama")
    inputs = STEP.inputs(model, prompt=150, response=20, group=4)
    return model, inputs, longstraw.explain(STEP.function, model, **inputs)


Found = tuple[nn.Module, dict[str, Any], longstraw.Explanation]


def test_law_counts_state_in_bytes_per_token(found: Found) -> None:
    _, _, explanation = found
    (branch,) = explanation.law().branches
    per_token = 2 * 2 * 2 * 16 * 8  # layers; keys and values; heads; width; float64
    for name in ("state", "state gradients"):
        assert sympy.diff(branch.kept[name].subs(law.KEPT, 1), law.PROMPT) == per_token
    assert set(branch.phases) == {"capture", "score", "replay", "unwind"}
    symbols = set().union(*(f.free_symbols for f in (*branch.kept.values(), *branch.phases.values())))
    assert symbols <= set(law.MEANING)
    assert f"state = {per_token}*P*kept" in str(explanation.law())


def test_law_on_the_meta_device_is_the_same(found: Found) -> None:
    _, inputs, explanation = found
    meta = {name: x.to("meta") if isinstance(x, Tensor) else x for name, x in inputs.items()}
    other = longstraw.explain(STEP.function, zoo.build("llama").to("meta"), **meta)
    assert other.estimate().peak == explanation.estimate().peak


def test_less_memory_makes_shorter_spans_and_the_same_gradients(found: Found, measured: Measured) -> None:
    model, inputs, explanation = found
    STEP.function(model, **inputs).backward()
    expected = [p.grad for p in model.parameters()]
    whole = explanation.estimate()
    model.zero_grad()
    _, estimate = measured(model, inputs, memory_budget=whole.peak // 2)
    assert estimate.plans[0].span_tokens < whole.plans[0].span_tokens
    for p, wanted in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, wanted, rtol=1e-10, atol=1e-14)


def test_a_budget_that_nothing_fits_names_the_least_one(found: Found, measured: Measured) -> None:
    model, inputs, _ = found
    model.zero_grad()
    with pytest.raises(
        BudgetTooSmall, match=r"rows, .* fits a memory budget of 524,288 bytes. The smallest takes [\d,]+. It has spans"
    ) as error:
        measured(model, inputs, memory_budget="512KiB")
    least = int(error.value.remedy.split("memory_budget=")[1].split()[0])
    torch._dynamo.reset()
    taken, estimate = measured(model, inputs, memory_budget=least)
    assert estimate.peak == least
    assert taken <= 1.1 * least


def test_explain_shows_the_plan(found: Found) -> None:
    model, inputs, explanation = found
    assert "plan: spans of 2048 tokens" in str(explanation)
    assert "MiB: weights and inputs" in explanation.estimate("3MiB").lines()[1]
    assert "state gradients" in explanation.estimate().parts
    explanation = longstraw.explain(STEP.function, model, **inputs, options={"memory_budget": 1000})
    assert "Give memory_budget=" in str(explanation)


@pytest.mark.parametrize(
    ("text", "size"), [("12GiB", 12 << 30), ("800 MB", 800_000_000), ("1.5kib", 1536), (7, 7), ("64B", 64)]
)
def test_budget_has_a_unit(text: int | str, size: int) -> None:
    assert Options(memory_budget=text).memory_budget == size


@pytest.mark.parametrize("text", ["12", "GiB", "-1GiB", 0, -5, 1.5, "12 apples"])
def test_budget_that_is_none(text: Any) -> None:
    with pytest.raises(OptionsError, match="memory_budget"):
        Options(memory_budget=text)


def plan(**changes: Any) -> Plan:
    return Plan(**{"span_tokens": 64, "replay_rows": None, "saved_every": None, "boundary_bytes": 0, **changes})


@pytest.mark.parametrize(
    "better",
    [
        lambda: (plan(span_tokens=128), plan()),
        lambda: (plan(), plan(tier="host")),
        lambda: (plan(boundary_bytes=8, saved_every=1), plan(boundary_bytes=8, saved_every=4)),
    ],
    ids=["longer spans", "on the device", "all boundary states"],
)
def test_of_two_plans_the_one_that_works_less_is_chosen(better: Callable[[], tuple[Plan, Plan]]) -> None:
    from longstraw.runtime.budget import _work

    one, other = better()
    shape = Shape(prompt=4096, response=64, rows=8, results=64, shared=4096)
    assert _work(one, shape, trained=True) < _work(other, shape, trained=True)


def test_a_plan_is_not_taken_over_to_larger_inputs_of_other_kinds() -> None:
    def with_more(model: nn.Module, prompt: Tensor, responses: Tensor, weights: Tensor, more: Tensor) -> Tensor:
        return small.step(model, prompt, responses, weights) + more.double().mean()

    torch._dynamo.reset()
    compiled = torch.compile(with_more, backend="longstraw", options={"memory_budget": "3MiB"})
    given = small.Tiny(), *small.inputs()
    compiled(*given, torch.zeros(100))
    with pytest.raises(BudgetTooSmall):
        compiled(*given, torch.zeros(4 << 20))
