"""Adapters of peft: the base frozen, adapters learn; loss and every adapter's gradient equal eager's."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn

from tests.equality import Comparison, assert_equal, compare
from tests.models import zoo
from tests.small import Tiny, assert_same, inputs, step
from tests.steps import STEPS, Step, clipped, response_logp, row_mean
from tests.sweeps import sweep

GRPO = STEPS["grpo"]
OPTIONS = {"span_tokens": 7, "page_tokens": 4}
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")


def adapted(name: str, targets: str | Sequence[str] = "all-linear", **overrides: object) -> PeftModel:
    """A tiny model with one adapter of rank 3, no part of it zero."""
    model = get_peft_model(zoo.build(name, **overrides), lora(targets))
    return randomised(model, seed=1).eval()


def lora(targets: str | Sequence[str], rank: int = 3, **more: object) -> LoraConfig:
    targets = targets if isinstance(targets, str) else list(targets)
    return LoraConfig(r=rank, lora_alpha=5, target_modules=targets, **more)


@torch.no_grad()
def randomised(model: PeftModel, seed: int) -> PeftModel:
    """Random values for every adapter."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(0.3 * noise)
    return model


def penalised(logp: Tensor, old_logp: Tensor, ref_logp: Tensor, mask: Tensor, advantages: Tensor) -> Tensor:
    """The clipped loss with a KL term."""
    gap = ref_logp - logp
    return row_mean(clipped(logp, old_logp, advantages) + 0.04 * (gap.exp() - gap - 1), mask)


def scores_inside(model, prompt, responses, mask, advantages):
    """Old policy and reference are scored in the step, by the same weights and by the base's."""
    with torch.no_grad():
        old_logp = response_logp(model, prompt, responses) - 0.1
        with model.disable_adapter():
            ref_logp = response_logp(model, prompt, responses)
    return penalised(response_logp(model, prompt, responses), old_logp, ref_logp, mask, advantages)


def assert_only_adapters_learn(comparison: Comparison) -> None:
    """Equal to eager, and no gradient for anything but adapters."""
    assert_equal(comparison)
    assert comparison.gradients and all("lora_" in name for name in comparison.gradients)


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("qwen3", "all-linear"),
        pytest.param("llama", ("q_proj", "v_proj"), marks=pytest.mark.slow),
        pytest.param("qwen3_moe", ATTENTION, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", "all-linear", marks=pytest.mark.slow),
        pytest.param("mixtral", "all-linear", marks=pytest.mark.slow),
        pytest.param("qwen3_5_text", "all-linear", marks=pytest.mark.slow),
        ("glm_moe_dsa", LATENT),
    ],
)
def test_adapters_equal_eager(name: str, targets: str | Sequence[str]) -> None:
    model = adapted(name, targets)
    assert_only_adapters_learn(compare(GRPO, model, GRPO.inputs(model), options=OPTIONS))


@pytest.mark.parametrize(
    "name",
    [
        "llama",
        pytest.param("qwen3_5_text", marks=pytest.mark.slow),
        pytest.param("glm_moe_dsa", marks=pytest.mark.slow),
    ],
)
def test_old_policy_and_reference_are_scored_by_the_same_model(name: str) -> None:
    model = adapted(name, LATENT if name == "glm_moe_dsa" else "all-linear")
    scored = Step(scores_inside)
    assert_only_adapters_learn(compare(scored, model, scored.inputs(model), options=OPTIONS))


def test_reference_is_scored_by_a_second_model() -> None:
    reference = zoo.build("llama", seed=3)

    def by_second(model, prompt, responses, mask, old_logp, advantages):
        with torch.no_grad():
            ref_logp = response_logp(reference, prompt, responses)
        return penalised(response_logp(model, prompt, responses), old_logp, ref_logp, mask, advantages)

    model = adapted("llama")
    assert_only_adapters_learn(compare(Step(by_second), model, Step(by_second).inputs(model), options=OPTIONS))
    assert all(parameter.grad is None for parameter in reference.parameters())


class Experts(nn.Module):
    """Weights of several experts in one parameter each, all of them used for every token."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(3, 16, 8, dtype=torch.float64) / 4)
        self.down = nn.Parameter(torch.randn(3, 8, 16, dtype=torch.float64) / 4)

    def forward(self, x: Tensor) -> Tensor:
        return sum(torch.tanh(x @ up) @ down for up, down in zip(self.up, self.down, strict=True))


class WithExperts(Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.experts = Experts()

    def hidden(self, ids: Tensor) -> Tensor:
        x = super().hidden(ids)
        x = x + self.experts(x)
        return x + self.out(self.attend(x).transpose(1, 2).reshape(x.shape))


@pytest.mark.parametrize(
    "how", sweep(["one adapter", "two adapters", "switched off", "merged"], always=["two adapters"])
)
def test_adapters_on_the_parameters_of_experts_equal_eager(how: str) -> None:
    config = lora(("query",), target_parameters=["experts.up", "experts.down"])
    model = get_peft_model(WithExperts(), config)
    if how == "two adapters":
        model.add_adapter("other", config)
        model.base_model.set_adapter(["default", "other"])
    randomised(model, seed=1)
    model.base_model.model.head.weight.requires_grad_()
    if how == "merged":
        model.merge_adapter()
    with model.disable_adapter() if how == "switched off" else contextlib.nullcontext():
        assert_same(model, *inputs())


# --- after compilation ------------------------------------------------------------------------------------------------


class Compiled:
    """A compiled step of one small model, which is changed between calls."""

    def __init__(self) -> None:
        self.model = randomised(get_peft_model(Tiny(), lora(("query", "value"))), seed=1)
        self.inputs = inputs()
        options = {"span_tokens": 4, "page_tokens": 2, "grad_dtype": torch.float64}
        self.step = torch.compile(step, backend="longstraw", fullgraph=True, options=options)

    def gradients(self, function: Callable[..., Tensor]) -> tuple[Tensor, dict[str, Tensor | None]]:
        self.model.zero_grad(set_to_none=True)
        loss = function(self.model, *self.inputs)
        if loss.requires_grad:
            loss.backward()
        return loss.detach(), {name: parameter.grad for name, parameter in self.model.named_parameters()}

    def assert_equals_eager(self) -> Tensor:
        """Return the loss."""
        (expected, eager), (found, ours) = self.gradients(step), self.gradients(self.step)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
        for name, grad in eager.items():
            assert (grad is None) == (ours[name] is None), name
            if grad is not None:
                assert (grad - ours[name]).norm() <= 1e-10 * grad.norm(), name
        return found


def scale_by_hand(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(getattr(module, "scaling", None), dict):
            module.scaling["default"] = 0.25


def resize(model: nn.Module) -> None:
    for module in model.modules():
        if hasattr(module, "lora_A"):
            first, second = module.lora_A["default"], module.lora_B["default"]
            module.lora_A["default"] = nn.Linear(first.in_features, 5, bias=False).double()
            module.lora_B["default"] = nn.Linear(5, second.out_features, bias=False).double()


CHANGES: dict[str, Callable[[PeftModel], object]] = {
    "new values": lambda model: randomised(model, seed=5),
    "scaling": scale_by_hand,
    "rank": resize,
    "merged": lambda model: model.merge_adapter(),
    "only one factor learns": lambda model: [
        p.requires_grad_("lora_A" in name) for name, p in model.named_parameters() if "lora_" in name
    ],
    "base learns": lambda model: model.base_model.model.out.weight.requires_grad_(),
}


@pytest.mark.parametrize("change", sweep(CHANGES, always=["scaling", "rank"]))
def test_change_after_compilation_is_seen(change: str) -> None:
    compiled = Compiled()
    before = compiled.assert_equals_eager()
    CHANGES[change](compiled.model)
    after = compiled.assert_equals_eager()
    same_loss = change in ("merged", "only one factor learns", "base learns")
    assert torch.allclose(before, after, rtol=1e-9) == same_loss


def test_adapters_are_added_switched_joined_and_deleted_after_compilation() -> None:
    compiled = Compiled()
    model, first = compiled.model, compiled.assert_equals_eager()
    model.add_adapter("other", lora(("key", "down"), rank=5))
    randomised(model, seed=2)
    model.set_adapter("other")
    assert compiled.assert_equals_eager() != first
    model.base_model.set_adapter(["default", "other"])
    compiled.assert_equals_eager()
    model.delete_adapter("other")
    model.set_adapter("default")
    compiled.assert_equals_eager()


def test_adapter_is_merged_and_unmerged_after_compilation() -> None:
    compiled = Compiled()
    first = compiled.assert_equals_eager()
    compiled.model.merge_adapter()
    compiled.assert_equals_eager()
    compiled.model.unmerge_adapter()
    torch.testing.assert_close(compiled.assert_equals_eager(), first, rtol=1e-12, atol=0)


def test_step_that_switches_adapters_is_compiled_once_for_each() -> None:
    compiled = Compiled()
    compiled.model.add_adapter("other", lora(("query", "value")))
    randomised(compiled.model, seed=2)
    torch._dynamo.utils.counters.clear()
    losses = []
    for name in ("other", "default") * 3:
        compiled.model.set_adapter(name)
        losses.append(compiled.assert_equals_eager())
    assert losses[0] == losses[2] == losses[4] != losses[1] == losses[3] == losses[5]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
