"""Each way of writing a GRPO step: compiled by longstraw it equals eager."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch

from tests.equality import assert_equal, compare, tolerance
from tests.models import zoo
from tests.steps import STEPS
from tests.sweeps import sweep

# Steps that together reach every part of a run: these also take spans of one token and spans longer than the prompt.
ALL_SPANS = ("grpo", "padded_batch", "long_response")


# Against float64: two roundings of bfloat16 differ from each other by more than from the truth.
# Steps that round, and what eager is off by at least (a check that float64 really is the other side).
LOW_PRECISION = {"autocast_inside": 1e-3, "autocast_outside": 1e-3, "autocast_float32_logp": 1e-3, "float32_logp": 1e-7}


# Near relatives of steps that always run.
RELATIVES = (
    "two_calls_accumulate_inside", "scaled_backward_inside", "two_optimizer_steps", "gspo_token", "entropy_by_softmax",
    "dapo", "dr_grpo", "cispo", "on_policy", "token_mean_loss", "logp_by_cross_entropy_reshape",
    "logp_transposed_cross_entropy", "temperature", "rows_logits_to_keep", "padded_batch_empty_response",
    "attention_mask_empty_response", "returns_tuple", "frozen_first_layer", "equal_responses", "one_response",
)  # fmt: skip


def _is_quick(name: str, span: int) -> bool:
    return name in ALL_SPANS or (span == 7 and name not in RELATIVES)


def spans() -> list[pytest.ParameterSet]:
    """Each step with spans of 7 tokens, and with spans of 1 and of all tokens (slow for most)."""
    return [
        pytest.param(name, span, id=f"{name}-{span}", marks=() if _is_quick(name, span) else pytest.mark.slow)
        for name in STEPS
        if name not in LOW_PRECISION
        for span in (7, 1, 1000)
    ]


@pytest.mark.parametrize(("name", "span_tokens"), spans())
def test_step_equals_eager(name: str, span_tokens: int) -> None:
    step = STEPS[name]
    model = zoo.build("qwen3", dtype=step.dtype)
    inputs = step.inputs(model)
    comparison = compare(step, model, inputs, options={"span_tokens": span_tokens, "page_tokens": 4})
    assert_equal(comparison, rtol=tolerance(step, model, inputs))


@pytest.mark.parametrize("span_tokens", sweep([7, 1000], always=[7]))
@pytest.mark.parametrize("name", LOW_PRECISION)
def test_low_precision_is_as_close_to_float64_as_eager(name: str, span_tokens: int) -> None:
    step = STEPS[name]
    model = zoo.build("qwen3", dtype=torch.float32)
    inputs = step.inputs(model)
    exact = {k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in inputs.items()}
    options = {"span_tokens": span_tokens, "page_tokens": 4}

    def gradients(function, model, inputs, context) -> torch.Tensor:
        model.zero_grad()
        with context():
            loss = function(model, **inputs)
        loss.backward()
        return torch.cat([p.grad.flatten().double() for p in model.parameters()])

    compiled = torch.compile(step.function, backend="longstraw", options=options)
    truth = gradients(STEPS["grpo"].function, copy.deepcopy(model).double(), exact, contextlib.nullcontext)
    eager, ours = (gradients(f, model, inputs, step.context) for f in (step.function, compiled))
    assert (eager - truth).norm() > LOW_PRECISION[name] * truth.norm(), "the step rounds"
    assert (ours - truth).norm() <= 1.1 * (eager - truth).norm()


@pytest.mark.parametrize("where", ["inside", "around"])
def test_scores_under_autocast_are_computed_in_the_dtype_that_the_step_names(where: str) -> None:
    """Logits are bfloat16 there, which a trace before autocast takes for float32: the cast must not be dropped."""
    step = STEPS["grpo"]
    model = zoo.build("qwen3", dtype=torch.float32)
    inputs = step.inputs(model, prompt=20, response=12)
    mixed = torch.autocast("cpu", torch.bfloat16)

    def scores(model, prompt, responses, context):
        ids = torch.cat([prompt.expand(responses.shape[0], -1), responses], 1)
        with context:
            logits = model(input_ids=ids, use_cache=False).logits[:, prompt.shape[1] - 1 : -1]
        return torch.log_softmax(logits.to(torch.float32), -1).gather(-1, responses[..., None]).squeeze(-1)

    compiled = torch.compile(scores, backend="longstraw", options={"span_tokens": 7, "page_tokens": 4})
    given = inputs["prompt"], inputs["responses"]
    nothing = contextlib.nullcontext()
    with torch.no_grad():
        exact = scores(copy.deepcopy(model).double(), *given, nothing)
        with mixed if where == "around" else nothing:
            eager, ours = (f(model, *given, mixed if where == "inside" else nothing) for f in (scores, compiled))
    for found in (eager, ours):  # the softmax was computed in float32
        assert found.dtype == torch.float32 and not torch.equal(found.to(torch.bfloat16).float(), found)
    errors = [(x - exact).square().mean().sqrt() for x in (eager, ours)]
    assert errors[1] <= 1.2 * errors[0]


@pytest.mark.parametrize("name", [name for name, step in STEPS.items() if step.one_graph])
@pytest.mark.slow
def test_step_is_one_graph(name: str) -> None:
    step = STEPS[name]
    model = zoo.build("qwen3", dtype=step.dtype)
    compare(step, model, step.inputs(model), backend="eager", fullgraph=True)


@pytest.mark.parametrize("name", ["grpo", "returns_metrics", "two_optimizer_steps"])
def test_eager_equals_itself_row_by_row(name: str) -> None:
    step = STEPS[name]
    model = zoo.build("qwen3")
    assert tolerance(step, model, step.inputs(model)) == 1e-10


def test_compare_finds_a_wrong_gradient() -> None:
    model = zoo.build("qwen3")
    step = STEPS["grpo"]

    def adds_to_one_gradient(model, prompt, responses, mask, old_logp, advantages):
        loss = step.function(model, prompt, responses, mask, old_logp, advantages)
        return loss + 1e-6 * (model.model.norm.weight.sum() - model.model.norm.weight.sum().detach())

    comparison = compare(step, model, step.inputs(model), reference=adds_to_one_gradient, backend="eager")
    assert comparison.outputs and max(comparison.outputs.values()) < 1e-14
    assert max(comparison.gradients, key=comparison.gradients.get) == "model.norm.weight"
    with pytest.raises(AssertionError, match=r"gradients model\.norm\.weight"):
        assert_equal(comparison)


def test_compare_finds_a_missing_gradient() -> None:
    model = zoo.build("qwen3")
    step = STEPS["grpo"]

    def forgets_the_head(model, prompt, responses, mask, old_logp, advantages):
        model.lm_head.weight.requires_grad_(False)
        return step.function(model, prompt, responses, mask, old_logp, advantages)

    comparison = compare(step, model, step.inputs(model), reference=forgets_the_head, backend="eager")
    assert any("lm_head.weight" in line for line in comparison.mismatches)
    with pytest.raises(AssertionError, match="lm_head"):
        assert_equal(comparison)


def test_compare_needs_a_reference_for_response_only_gradients() -> None:
    model = torch.nn.Linear(1, 1)
    with pytest.raises(ValueError, match="reference"):
        compare(STEPS["grpo"], model, {}, prompt_grad="none")
