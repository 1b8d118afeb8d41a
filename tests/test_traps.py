"""What must hold of a compiled step where others went wrong: sharing, order, masks, positions, ties, repeated steps."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from longstraw.errors import LongstrawError
from tests import small
from tests.equality import assert_equal, compare
from tests.models import zoo
from tests.steps import STEPS, Step, equal_responses, repeat_prompt, response_logp, selected_logp
from tests.sweeps import sweep

OPTIONS = {"span_tokens": 7, "page_tokens": 4, "grad_dtype": torch.float64}
GRPO = STEPS["grpo"]


def compiled(step: Callable, **options: Any) -> Callable:
    torch._dynamo.reset()
    return torch.compile(step, backend="longstraw", options={**OPTIONS, **options})


def logp_and_loss(model, prompt, responses, mask, old_logp, advantages):
    logp = response_logp(model, prompt, responses)
    ratio = (logp - old_logp).exp()
    return -(ratio * advantages[:, None] * mask).sum() / mask.sum(), logp.detach(), ratio.detach()


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    """Run backward; return the gradients and clear them."""
    model.zero_grad()
    loss.backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    return found


def largest_gap(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    """The largest relative difference of two sets of gradients."""
    return max(float((left[name] - right[name]).norm() / right[name].norm()) for name in right)


# --- sharing and order ---


def test_equal_responses_have_equal_logp_and_gradients() -> None:
    model = zoo.build("llama")
    inputs = dataclasses.replace(GRPO, change=equal_responses).inputs(model)
    inputs["mask"].fill_(1)
    inputs["old_logp"][:] = inputs["old_logp"][:1].clone()
    step = compiled(logp_and_loss)
    found = []
    for row in range(3):
        inputs["advantages"] = torch.eye(3, dtype=torch.float64)[row]
        loss, logp, _ = step(model, **inputs)
        assert torch.equal(logp[0], logp[1]) and torch.equal(logp[0], logp[2])
        found.append(gradients(model, loss))
    assert all(torch.equal(found[0][name], other[name]) for other in found[1:] for name in other)


@pytest.mark.parametrize("replay_rows", [1, 3])
def test_a_second_run_is_bit_equal(replay_rows: int) -> None:
    model = zoo.build("qwen3")
    inputs = GRPO.inputs(model)
    step = compiled(GRPO.function, replay_rows=replay_rows)
    first = step(model, **inputs)
    expected = gradients(model, first)
    second = step(model, **inputs)
    assert torch.equal(first, second)
    got = gradients(model, second)
    assert all(torch.equal(got[name], expected[name]) for name in expected)


def test_permuted_responses_have_bit_equal_logp() -> None:
    model = zoo.build("qwen3")
    inputs = GRPO.inputs(model, group=4)
    step = compiled(logp_and_loss, replay_rows=1)
    _, expected, _ = step(model, **inputs)
    for order in ([3, 2, 1, 0], [1, 3, 0, 2]):
        rows = {name: inputs[name][order] for name in ("responses", "mask", "old_logp", "advantages")}
        _, logp, _ = step(model, **{**inputs, **rows})
        assert torch.equal(logp, expected[order])


def test_spans_and_batches_of_rows_do_not_change_the_gradient() -> None:
    model = zoo.build("qwen3")
    inputs = GRPO.inputs(model)
    expected = gradients(model, GRPO.function(model, **inputs))
    for span_tokens, replay_rows in ((1, 1), (7, 3), (1000, 1)):
        step = compiled(GRPO.function, span_tokens=span_tokens, replay_rows=replay_rows)
        assert largest_gap(gradients(model, step(model, **inputs)), expected) < 1e-10


def test_lengths_around_the_span_in_one_compilation() -> None:
    model = zoo.build("llama")
    step = compiled(GRPO.function)
    torch._dynamo.utils.counters.clear()
    for prompt, response in ((7, 3), (8, 3), (6, 7), (14, 8), (15, 6), (2, 2)):
        inputs = GRPO.inputs(model, prompt=prompt, response=response)
        expected = gradients(model, GRPO.function(model, **inputs))
        assert largest_gap(gradients(model, step(model, **inputs)), expected) < 1e-10, (prompt, response)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


# --- what a token sees, and which tokens are trained ---


def test_the_first_response_token_trains_the_prompt() -> None:
    model = zoo.build("llama")
    inputs = GRPO.inputs(model, response=1, group=2)
    loss = compiled(GRPO.function)(model, **inputs)
    got, expected = gradients(model, loss), gradients(model, GRPO.function(model, **inputs))
    assert largest_gap(got, expected) < 1e-10
    first = int(inputs["prompt"][0, 0])
    assert got["model.embed_tokens.weight"][first].norm() > 0


def test_tokens_of_a_tool_are_attended_and_not_trained() -> None:
    model = zoo.build("llama")
    inputs = GRPO.inputs(model, prompt=6, response=4, group=2)
    inputs["mask"] = torch.tensor([[1.0, 0, 0, 1]] * 2, dtype=torch.float64)
    step = compiled(logp_and_loss)
    loss, logp, _ = step(model, **inputs)
    expected = logp_and_loss(model, **inputs)
    torch.testing.assert_close(logp, expected[1], rtol=1e-10, atol=0)
    assert largest_gap(gradients(model, loss), gradients(model, expected[0])) < 1e-10

    changed = inputs["responses"].clone()
    changed[:, 1] = (changed[:, 1] + 1) % zoo.VOCAB
    _, other, _ = step(model, **{**inputs, "responses": changed})
    assert torch.equal(other[:, 0], logp[:, 0])
    assert ((other[:, 3] - logp[:, 3]).abs() > 1e-6).all()


def test_temperature_is_the_same_on_both_sides() -> None:
    def step(model, prompt, responses, old_logp):
        ids = torch.cat([prompt.expand(responses.shape[0], -1), responses], 1)
        logits = model(input_ids=ids, use_cache=False).logits[:, prompt.shape[1] - 1 : -1] / 0.5
        logp = selected_logp(logits, responses)
        return (logp - old_logp).exp().mean(), logp.detach()

    model = zoo.build("qwen3")
    inputs = {name: value for name, value in GRPO.inputs(model).items() if name in ("prompt", "responses", "old_logp")}
    run = compiled(step)
    with torch.no_grad():
        _, inputs["old_logp"] = run(model, **inputs)
    ratio, logp = run(model, **inputs)
    assert torch.equal(logp, inputs["old_logp"]) and ratio.item() == 1.0


def test_old_and_new_logp_belong_to_the_same_tokens() -> None:
    model = zoo.build("llama")
    inputs = GRPO.inputs(model, prompt=2, response=2)
    _, logp, _ = compiled(logp_and_loss)(model, **inputs)
    torch.testing.assert_close(logp, response_logp(model, inputs["prompt"], inputs["responses"]), rtol=1e-10, atol=0)


@pytest.mark.parametrize("name", ["grpo", "padded_batch_left"])
def test_learned_positions_continue_in_the_response(name: str) -> None:
    model = zoo.build("gpt2")
    step = STEPS[name]
    assert_equal(compare(step, model, step.inputs(model, prompt=6, response=3), options=OPTIONS))


# --- models ---


def checkpoint(model: nn.Module) -> None:
    """Gradient checkpointing as users switch it on, the cache left at its default."""
    model.train()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the method gets another name in a later release
        model.gradient_checkpointing_enable()


def test_gradient_checkpointing_does_not_change_the_gradient() -> None:
    model = zoo.build("llama")
    step = Step(repeat_prompt, prompt=3, response=2, prepare=checkpoint)
    assert_equal(compare(step, model, step.inputs(model), options=OPTIONS, reference=Step(repeat_prompt)))


def checkpoint_frozen_embeddings(model: nn.Module) -> None:
    """As adapters are trained: a hook makes the embeddings require a gradient, for checkpoints to see one."""
    checkpoint(model)
    model.requires_grad_(False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("q_proj" in name)
    model.enable_input_require_grads()


def frozen_embeddings(model: nn.Module) -> None:
    checkpoint(model)
    model.get_input_embeddings().requires_grad_(False)


@pytest.mark.parametrize("prepare", [checkpoint_frozen_embeddings, frozen_embeddings])
def test_gradient_checkpointing_over_frozen_embeddings(prepare: Callable[[nn.Module], None]) -> None:
    model = zoo.build("llama")
    step = Step(repeat_prompt, prompt=5, response=2, prepare=prepare)
    comparison = compare(step, model, step.inputs(model), options=OPTIONS)
    assert comparison.gradients
    assert_equal(comparison)


def test_layers_that_share_keys_and_values() -> None:
    model = zoo.build("gemma4-shared_kv")
    comparison = compare(GRPO, model, GRPO.inputs(model), options=OPTIONS)
    assert any("k_proj" in name for name in comparison.gradients)
    assert_equal(comparison)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_experts_that_tie_are_chosen_alike(name: str) -> None:
    model = zoo.build(name)
    routers = [value for key, value in model.named_parameters() if key.endswith("gate.weight")]
    assert routers
    with torch.no_grad():
        for router in routers:
            router.copy_(router[:1].expand_as(router).clone())
    assert_equal(compare(GRPO, model, GRPO.inputs(model), options=OPTIONS))


def test_a_router_loss_over_all_tokens_is_exact_or_refused() -> None:
    def step(model, prompt, responses, mask, old_logp, advantages):
        ids = torch.cat([prompt.expand(responses.shape[0], -1), responses], 1)
        outputs = model(input_ids=ids, use_cache=False, output_router_logits=True)
        logp = selected_logp(outputs.logits[:, prompt.shape[1] - 1 : -1], responses)
        return -(logp * advantages[:, None] * mask).sum() + 0.1 * outputs.aux_loss

    model = zoo.build("mixtral")
    try:
        comparison = compare(Step(step), model, GRPO.inputs(model), options=OPTIONS)
    except LongstrawError as refused:
        assert "modeling_mixtral.py" in str(refused)
    else:
        assert_equal(comparison)


# --- repeated steps ---


def test_state_is_captured_again_after_an_optimizer_step() -> None:
    losses: dict[str, list[float]] = {}
    for kind in ("eager", "compiled"):
        model = zoo.build("llama")
        inputs = GRPO.inputs(model)
        step = GRPO.function if kind == "eager" else compiled(GRPO.function)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses[kind] = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = step(model, **inputs)
            loss.backward()
            optimizer.step()
            losses[kind].append(loss.item())
    assert len(set(losses["eager"])) == 3
    assert losses["compiled"] == pytest.approx(losses["eager"], rel=1e-10)


def test_a_cast_that_changes_nothing_under_no_grad_keeps_the_gradient() -> None:
    """The trace takes the cast for the parameter itself wherever that is used later."""

    def with_norm(model: nn.Module, prompt: Tensor, responses: Tensor, weights: Tensor) -> Tensor:
        with torch.no_grad():
            norm = sum(p.double().contiguous().square().sum() for p in model.parameters())
        return small.step(model, prompt, responses, weights) / norm

    torch._dynamo.reset()
    small.assert_same(small.Tiny(), *small.inputs(), function=with_norm)
    small.assert_same(small.Tiny(), *small.inputs(), function=with_norm, check="numbers")


# --- sizes ---


def _named_group(group: int) -> Callable[..., Tensor]:
    def step(model, prompt, responses, mask, old_logp, advantages):
        ids = torch.cat([prompt.expand(group, -1), responses], 1)
        logits = model(input_ids=ids, use_cache=False).logits[:, prompt.shape[1] - 1 : -1]
        losses = (selected_logp(logits, responses) - old_logp).exp() * mask
        return -sum(advantages[i] * losses[i].sum() / mask[i].sum() for i in range(group)) / group

    return step


@pytest.mark.parametrize(
    ("name", "group"),
    sweep(
        [("qwen3", 2), ("qwen3", 4), ("qwen3", 8), ("gemma2", 3), ("mixtral", 2), ("qwen3_next", 4), ("gpt2", 8)],
        always=[("qwen3", 4), ("gemma2", 3), ("mixtral", 2)],
    ),
)
def test_a_number_of_rows_that_the_code_names(name: str, group: int) -> None:
    """Rows are a constant then, and other dims (heads, experts of a token) have the same size."""
    step = Step(_named_group(group))
    model = zoo.build(name)
    assert_equal(compare(step, model, step.inputs(model, group=group), options=OPTIONS))
