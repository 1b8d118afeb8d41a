"""Python values that change from call to call: floats have one graph for all, and nothing ends in eager code."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from longstraw.errors import CompiledTooOften
from tests.small import Tiny, inputs

OPTIONS = {"span_tokens": 4, "page_tokens": 2}


class Trainer:
    """A step that is a method, with what a trainer has."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.coefficient = model, 0.1
        self.metrics: list[Any] = []

    def log_probs(self, prompt: Tensor, responses: Tensor, temperature: float = 1.0) -> Tensor:
        """Of the responses, `[G, R]`."""
        logits = self.model(torch.cat([prompt.expand(len(responses), -1), responses], 1)) / temperature
        logp = torch.log_softmax(logits[:, prompt.shape[1] - 1 : -1], -1)
        return logp.gather(-1, responses[..., None]).squeeze(-1)


Step = Callable[[Trainer, Tensor, Tensor, Tensor], Any]


def clipped(t: Trainer, prompt: Tensor, responses: Tensor, weights: Tensor) -> Any:
    """A coefficient, a bound and a temperature that change; two of the outputs are the number itself."""
    c = t.coefficient
    logp = t.log_probs(prompt, responses, temperature=1 + c)
    ratio = (logp - logp.detach()).exp() * (1 + 0.3 * weights)
    loss = -(torch.minimum(ratio * weights, ratio.clamp(1 - c, 1 + c) * weights)).mean() + c * logp.mean()
    return loss, 2 * c, torch.tensor(c), c


def other_ops(t: Trainer, prompt: Tensor, responses: Tensor, weights: Tensor) -> Any:
    """Whatever else a number meets."""
    c, logp = t.coefficient, t.log_probs(prompt, responses)
    found = [c - logp, c / logp, logp / c, logp.abs() ** c, c**logp, torch.add(logp, weights, alpha=c), c + logp]
    found += [logp.clamp(min=-c), torch.clamp(logp, -4, -c), torch.where(weights > c, logp, c)]
    found += [torch.where(weights > 0, c, 0.5) * logp, logp.masked_fill(weights < c, c), logp.exp().clone().mul_(c)]
    found += [max(c, 0.05) * logp, (c / responses.shape[1]) * logp, -c * logp, responses * c * logp, logp * (1 - c**2)]
    found += [logp.sum() * c, responses.sum() * c * logp, logp.sum() > c, logp.half().mean() * c]
    return sum(f.float().sum() for f in found), *found


def backward_inside(t: Trainer, prompt: Tensor, responses: Tensor, weights: Tensor) -> Any:
    """Two backward calls, one number."""
    total = torch.zeros(())
    for part in (weights, weights**2):
        loss = (t.log_probs(prompt, responses) * part).mean() * (1 - t.coefficient)
        loss.backward()
        total = total + loss.detach()
    return total * t.coefficient


@pytest.mark.parametrize("step", [clipped, other_ops, backward_inside])
def test_a_float_that_changes_has_one_graph(step: Step) -> None:
    dtype = torch.float32
    trainer, (prompt, responses, weights) = Trainer(Tiny().to(dtype)), inputs()
    weights = weights.to(dtype)
    compiled = torch.compile(step, backend="longstraw", options=OPTIONS)
    eps = torch.finfo(dtype).eps
    counters.clear()

    def run(function: Step) -> tuple[list[Any], list[Tensor]]:
        trainer.model.zero_grad()
        found = function(trainer, prompt, responses, weights)
        outputs = list(found) if isinstance(found, tuple) else [found]
        if outputs[0].requires_grad:
            outputs[0].backward()
        return outputs, [p.grad.clone() for p in trainer.model.parameters() if p.grad is not None]

    for coefficient in (0.1, 0.2, 0.15, 0.0625, 0.3):
        trainer.coefficient = coefficient
        (expected, gradients), (found, ours) = run(step), run(compiled)
        for i, (one, other) in enumerate(zip(found, expected, strict=True)):
            tolerance = 2e-3 if isinstance(other, Tensor) and other.dtype == torch.float16 else 1000 * eps
            assert type(one) is type(other), i
            torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance, msg=lambda m, n=i: f"{n}: {m}")
        largest = max(float(g.abs().max()) for g in gradients)
        for one, other in zip(ours, gradients, strict=True):
            torch.testing.assert_close(one, other, rtol=1000 * eps, atol=1000 * eps * largest)
    assert counters["stats"]["unique_graphs"] == 2


def test_a_scale_of_attention_that_changes_is_a_constant_of_each_graph() -> None:
    class Scaled(Tiny):
        scale = 0.5

        def attend(self, x: Tensor) -> Tensor:
            q, k, v = self.heads(self.query(x), 2), self.heads(self.key(x), 2), self.heads(self.value(x), 2)
            return nn.functional.scaled_dot_product_attention(
                q, k.repeat(1, 1, 1, 2), v.repeat(1, 1, 1, 2), is_causal=True, scale=self.scale
            )

    trainer, args = Trainer(Scaled()), inputs()

    def step(t: Trainer, *args: Tensor) -> Tensor:
        return (t.log_probs(*args[:2]) * args[2]).sum()

    compiled = torch.compile(step, backend="longstraw", options=OPTIONS)
    for scale in (0.5, 0.25, 0.5, 0.75):
        trainer.model.scale = scale
        torch.testing.assert_close(compiled(trainer, *args), step(trainer, *args), rtol=1e-11, atol=1e-11)


def appends(t: Trainer, prompt: Tensor, responses: Tensor, weights: Tensor) -> Tensor:
    """Metrics are kept in the step."""
    loss = (t.log_probs(prompt, responses) * weights).mean()
    t.metrics.append(loss.detach())
    return loss


def known_numbers(t: Trainer, prompt: Tensor, responses: Tensor, weights: Tensor) -> Tensor:
    """Python computes with the float, and its result is a constant."""
    return (t.log_probs(prompt, responses) * weights).mean() * math.exp(t.coefficient)


def breaks_before(t: Trainer, prompt: Tensor, responses: Tensor, weights: Tensor) -> Tensor:
    """A frame without a model calls what has one."""
    t.metrics.append(0)
    torch._dynamo.graph_break()
    return (t.log_probs(prompt, responses) * weights).mean()


@pytest.mark.parametrize(
    "step, shown, fullgraph",
    [
        (appends, r"len\(t\.metrics\)", False),
        (appends, r"len\(t\.metrics\)", True),
        (known_numbers, r"t\.coefficient", False),
        (breaks_before, r"len\(t\.metrics\)", False),
    ],
)
def test_a_step_compiled_too_often_is_refused(step: Step, shown: str, fullgraph: bool) -> None:
    trainer, args = Trainer(Tiny()), inputs()
    compiled = torch.compile(step, backend="longstraw", options=OPTIONS, fullgraph=fullgraph)
    with torch._dynamo.config.patch(recompile_limit=2):
        for i in range(2):
            trainer.coefficient = 0.1 * (i + 1)
            compiled(trainer, *args)
        for _ in range(2):
            trainer.coefficient = 0.05
            with pytest.raises(CompiledTooOften, match=shown) as error:
                compiled(trainer, *args)
    assert f"in {step.__name__}" in str(error.value) and "recompile_limit" in str(error.value)


def test_metrics_after_the_model_may_be_eager() -> None:
    trainer, args = Trainer(Tiny()), inputs()

    def step(t: Trainer, prompt: Tensor, responses: Tensor, weights: Tensor) -> Tensor:
        loss = (t.log_probs(prompt, responses) * weights).mean()
        torch._dynamo.graph_break()
        t.metrics.append(loss.detach() * 2)
        return loss

    compiled = torch.compile(step, backend="longstraw", options=OPTIONS)
    with torch._dynamo.config.patch(recompile_limit=2):
        for _ in range(5):
            compiled(trainer, *args)
    assert len(trainer.metrics) == 5
