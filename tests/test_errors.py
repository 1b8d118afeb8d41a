"""Every refusal, provoked by a short program: its class, the cause and the user's line that it names, the remedy."""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.exc import TorchRuntimeError

from longstraw import Rule, errors
from longstraw.runtime import mixing
from longstraw.runtime.state import Store
from tests.models import zoo
from tests.steps import STEPS, response_logp
from tests.sweeps import sweep

OPTIONS = {"span_tokens": 7, "page_tokens": 4}
THIS_FILE = "test_errors.py"
STEP = STEPS["grpo"]


@contextlib.contextmanager
def raises(cls: type[errors.LongstrawError], *parts: str) -> Iterator[None]:
    """Expect an error of longstraw, raised by the compiler or at run time, whose text holds all `parts`."""
    with pytest.raises(cls) as caught:
        yield
    error = caught.value
    assert type(error) is cls, f"{type(error).__name__}: {error}"
    assert error.remedy
    for part in parts:
        assert part in str(error)


def compiled(step: Callable = STEP.function, **options: Any) -> Callable:
    return torch.compile(step, backend="longstraw", options={**OPTIONS, **options})


def model_and_inputs() -> tuple[nn.Module, dict[str, Any]]:
    model = zoo.build("llama")
    return model, STEP.inputs(model)


class Output:
    """What a model returns."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


class Model(nn.Module):
    """An embedding, something between, and a head."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(zoo.VOCAB, 16, dtype=torch.float64)
        self.between = between
        self.head = nn.Linear(16, zoo.VOCAB, dtype=torch.float64)

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def forward(self, input_ids: Tensor, use_cache: bool = False) -> Output:
        return Output(self.head(self.between(self.embed(input_ids))))


def run(between: Callable[[Tensor], Tensor]) -> None:
    """Run the compiled step of a model with something between embedding and head."""
    model = Model(between)
    compiled()(model, **STEP.inputs(model)).backward()


# --- forward and backward ---


def test_a_parameter_changed_before_backward() -> None:
    model, inputs = model_and_inputs()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = compiled()(model, **inputs)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    with raises(
        errors.ParametersChanged,
        "model.model.embed_tokens.weight was changed",
        "and 20 more tensors",
        "before optimizer.step()",
    ):
        loss.backward()


def test_a_parameter_replaced_before_backward() -> None:
    model, inputs = model_and_inputs()
    loss = compiled()(model, **inputs)
    model.lm_head.weight.data = model.lm_head.weight.data * 1.5
    with raises(errors.ParametersChanged, "lm_head", "replaced"):
        loss.backward()


def test_a_frozen_parameter_changed_before_backward() -> None:
    model, inputs = model_and_inputs()
    model.model.norm.weight.requires_grad_(False)
    loss = compiled()(model, **inputs)
    model.model.norm.weight.mul_(2)
    with raises(errors.ParametersChanged, "model.model.norm.weight was changed"):
        loss.backward()


def test_tokens_overwritten_before_backward() -> None:
    model, inputs = model_and_inputs()
    loss = compiled()(model, **inputs)
    inputs["responses"].zero_()
    with raises(errors.ParametersChanged, "responses was changed"):
        loss.backward()


def test_backward_twice() -> None:
    model, inputs = model_and_inputs()
    loss = compiled()(model, **inputs)
    loss.backward(retain_graph=True)
    with raises(errors.BackwardTwice, "second time", "Call the step again"):
        loss.backward()


def test_gradient_of_a_gradient() -> None:
    model, inputs = model_and_inputs()
    loss = compiled()(model, **inputs)
    with raises(errors.DoubleBackward, "gradient of a gradient", "create_graph=False"):
        loss.backward(create_graph=True)


# --- the model ---


def test_active_dropout() -> None:
    model, inputs = model_and_inputs()
    model.train()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    with raises(errors.DropoutActive, "p=0.1", "model.eval()"):
        compiled()(model, **inputs)


def test_batch_norm_in_training_mode() -> None:
    norm = nn.BatchNorm1d(16, dtype=torch.float64)
    with raises(errors.MixesRows, "batch_norm", THIS_FILE, "norm(hidden.mT)", "eval mode"):
        run(lambda hidden: norm(hidden.mT).mT)


def test_batch_norm_in_eval_mode_is_no_error() -> None:
    norm = nn.BatchNorm1d(16, dtype=torch.float64).eval()
    model = Model(lambda hidden: norm(hidden.mT).mT)
    inputs = STEP.inputs(model)
    torch.testing.assert_close(compiled()(model, **inputs), STEP.function(model, **inputs), rtol=1e-12, atol=0)


def test_a_mean_over_rows() -> None:
    with raises(errors.MixesRows, "aten.mean", THIS_FILE, "hidden.mean(0)", "a row's hidden values"):
        run(lambda hidden: hidden - hidden.mean(0))


@pytest.mark.parametrize(
    "function",
    [
        lambda hidden, weight: hidden * weight[:, :1, None],
        lambda hidden, weight: hidden + weight[:, None],
        lambda hidden, weight: torch.where(hidden > 0, hidden, weight[:, None]),
        lambda hidden, weight: torch.einsum("gsw,gw->gsw", hidden, weight),
        lambda hidden, weight: hidden @ weight.diag_embed(),
    ],
)
def test_a_weight_with_an_entry_for_each_row(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    weight = nn.Parameter(torch.randn(STEP.group, 16, dtype=torch.float64))
    with raises(errors.UnsupportedOp, "in every row", THIS_FILE, "lambda", "to the step as a tensor"):
        run(lambda hidden: function(hidden, weight))


def shift(hidden: Tensor) -> Tensor:
    return hidden + torch.roll(hidden, 1, 1)


def running_product(hidden: Tensor) -> Tensor:
    return hidden + hidden.cumprod(1)


def pad_and_cut(hidden: Tensor) -> Tensor:
    return hidden + F.pad(hidden, (0, 0, 1, 0))[:, :-1]


def first_token(hidden: Tensor) -> Tensor:
    return hidden + hidden[:, 0][:, None]


def softmax_over_tokens(hidden: Tensor) -> Tensor:
    return hidden.softmax(1)


@pytest.mark.parametrize(
    ("between", "op", "line"),
    [
        (shift, "aten.roll", "torch.roll(hidden, 1, 1)"),
        (running_product, "aten.cumprod", "hidden.cumprod(1)"),
        (pad_and_cut, "aten.add", "F.pad(hidden"),
        (softmax_over_tokens, "aten.softmax", "hidden.softmax(1)"),
        (first_token, "aten.squeeze", "hidden[:, 0]"),
    ],
)
def test_an_op_that_mixes_tokens(between: Callable, op: str, line: str) -> None:
    with raises(errors.MixesTokens, op, THIS_FILE, f"in {between.__name__}", line, "Options(rules="):
        run(between)


def test_an_op_without_a_rule() -> None:
    with raises(errors.UnsupportedOp, "aten.group_norm", THIS_FILE, "longstraw/arch/aten.py"):
        run(lambda hidden: F.group_norm(hidden.mT, 2).mT)


def test_an_in_place_op_on_a_parameter() -> None:
    def step(model, prompt, responses, mask, old_logp, advantages):
        with torch.no_grad():
            model.get_input_embeddings().weight.mul_(2)
        return (response_logp(model, prompt, responses) * mask).mean()

    model, inputs = model_and_inputs()
    with raises(errors.UnsupportedOp, "aten.mul_", "weight.mul_(2)", "out-of-place"):
        compiled(step)(model, **inputs)


def test_attention_without_a_mask() -> None:
    def attend(hidden: Tensor) -> Tensor:
        heads = hidden[:, None]
        return F.scaled_dot_product_attention(heads, heads, heads)[:, 0]

    with raises(errors.UnsupportedMask, "not causal", THIS_FILE, "scaled_dot_product_attention(heads", "causal mask"):
        run(attend)


def test_a_mask_that_shows_later_tokens() -> None:
    def step(model, prompt, responses, mask, old_logp, advantages):
        ids = torch.cat([prompt.expand(responses.shape[0], -1), responses], 1)
        seen = torch.ones(ids.shape[0], 1, ids.shape[1], ids.shape[1], dtype=torch.bool)
        logits = model(input_ids=ids, attention_mask=seen, use_cache=False).logits[:, prompt.shape[1] - 1 : -1]
        return (logits.logsumexp(-1) * mask).mean()

    model, inputs = model_and_inputs()
    with raises(errors.UnsupportedMask, "not causal", "causal mask"):
        compiled(step)(model, **inputs)


# --- control flow ---


def branch_on_a_sum(hidden: Tensor) -> Tensor:
    if hidden.sum() > 0:
        return hidden * 2
    return hidden


def multiply_by_a_number(hidden: Tensor) -> Tensor:
    return hidden * hidden.sum().item()


def print_in_between(hidden: Tensor) -> Tensor:
    print("between")
    return hidden * 2


@pytest.mark.parametrize(
    ("between", "line"),
    [
        (branch_on_a_sum, "if hidden.sum() > 0"),
        (multiply_by_a_number, "hidden.sum().item()"),
        (print_in_between, 'print("between")'),
    ],
)
def test_a_model_that_breaks_the_graph(between: Callable, line: str) -> None:
    with raises(errors.ModelSplit, THIS_FILE, line, "fullgraph=True"):
        run(between)


class Recurrent(Model):
    """A model with a layer that Dynamo doesn't trace, in its own forward: Dynamo skips that frame altogether."""

    def __init__(self) -> None:
        super().__init__(lambda hidden: hidden)
        self.gru = nn.GRU(16, 16, batch_first=True, dtype=torch.float64)

    def forward(self, input_ids: Tensor, use_cache: bool = False) -> Output:
        return Output(self.head(self.gru(self.embed(input_ids))[0]))


def test_a_model_that_dynamo_gives_up_on() -> None:
    model = Recurrent()
    with raises(errors.ModelSplit, "outside of the compiled graph", "logits", "fullgraph=True"):
        compiled()(model, **STEP.inputs(model))


# --- results ---


def hidden_states(model: nn.Module, prompt: Tensor, responses: Tensor) -> Tensor:
    ids = torch.cat([prompt.expand(responses.shape[0], -1), responses], 1)
    return model.model(input_ids=ids, use_cache=False).last_hidden_state


def test_logits_returned() -> None:
    def step(model, prompt, responses, mask, old_logp, advantages):
        logits = model(torch.cat([prompt.expand(responses.shape[0], -1), responses], 1), use_cache=False).logits
        return logits.logsumexp(-1).mean(), logits

    model, inputs = model_and_inputs()
    with raises(errors.WideResult, "hidden values of every token", "log-probabilities"):
        compiled(step)(model, **inputs)


def test_a_compiled_model() -> None:
    model, inputs = model_and_inputs()
    with raises(errors.WideResult, "not the model"):
        compiled(model)(inputs["prompt"], use_cache=False)


def test_a_leaf_made_inside_the_step_and_returned() -> None:
    def step(model, prompt, responses, mask, old_logp, advantages):
        ids = torch.cat([prompt.expand(responses.shape[0], -1), responses], 1)
        logits = model(ids, use_cache=False).logits[:, prompt.shape[1] - 1 : -1]
        logp = logits.log_softmax(-1).gather(-1, responses[..., None]).squeeze(-1).detach().requires_grad_()
        return (logp * mask).sum(), logp

    model, inputs = model_and_inputs()
    with raises(errors.UnsupportedOp, "requires_grad_() on a value", THIS_FILE, "pass it in"):
        compiled(step)(model, **inputs)


def test_a_loss_on_hidden_states_of_several_rows() -> None:
    def step(model, prompt, responses, mask, old_logp, advantages):
        return hidden_states(model, prompt, responses).std(0).sum()

    model, inputs = model_and_inputs()
    with raises(errors.MixesRows, "aten.std", THIS_FILE, ".std(0).sum()", "after the per-token results"):
        compiled(step)(model, **inputs)


def test_pairs_of_rows_compared_by_hidden_states() -> None:
    def step(model, prompt, responses, mask, old_logp, advantages):
        hidden = hidden_states(model, prompt, responses)
        return (hidden[1:] - hidden[:-1]).square().sum(-1).mean()

    model, inputs = model_and_inputs()
    with raises(errors.MixesRows, "a part of the rows", THIS_FILE, "hidden[1:] - hidden[:-1]"):
        compiled(step)(model, **inputs)


def test_response_only_gradients_with_results_for_all_tokens() -> None:
    step = STEPS["full_logits_masked"]
    model = zoo.build("llama")
    with raises(errors.PromptNotFound, "results for all tokens", "logits_to_keep"):
        compiled(step.function, prompt_grad="none")(model, **step.inputs(model))


# --- inputs ---


def test_empty_responses() -> None:
    model, inputs = model_and_inputs()
    step = compiled()
    step(model, **inputs)
    empty = {name: inputs[name][:, :0] for name in ("responses", "mask", "old_logp")}
    with raises(errors.BadInput, "responses is empty", "(3, 0)"):
        step(model, **{**inputs, **empty})


def test_tensors_on_several_devices() -> None:
    def step(model, prompt, responses, mask, old_logp, advantages):
        return response_logp(model, prompt, responses).mean(), old_logp * 2

    model, inputs = model_and_inputs()
    with raises(errors.BadInput, "old_logp on meta", "one device"):
        compiled(step)(model, **{**inputs, "old_logp": inputs["old_logp"].to("meta")})


def test_tensors_on_several_devices_in_one_op_are_dynamos_error() -> None:
    model, inputs = model_and_inputs()
    with pytest.raises(TorchRuntimeError, match="device"):
        compiled()(model, **{**inputs, "old_logp": inputs["old_logp"].to("meta")})


@pytest.mark.parametrize("value", sweep([math.inf, -math.inf, math.nan], always=[math.inf, math.nan]))
def test_values_that_are_not_finite_are_passed_on(value: float) -> None:
    model, inputs = model_and_inputs()
    inputs["old_logp"][1, 2] = value
    losses, gradients = [], []
    for step in (STEP.function, compiled()):
        model.zero_grad()
        losses.append(step(model, **inputs))
        losses[-1].backward()
        gradients.append([parameter.grad.norm() for parameter in model.parameters()])
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-10, atol=0, equal_nan=True)
    # Norms: a gradient of NaN times a weight of zero reaches later tokens in eager and not here.
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-8, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"span": 3}, ("Unknown option 'span'", "span_tokens")),
        ({"span_tokens": 0}, ("span_tokens=0", "positive integer or 'auto'")),
        ({"replay_rows": "many"}, ("replay_rows='many'", "positive integer or 'auto'")),
        ({"page_tokens": "auto"}, ("page_tokens='auto'", "a positive integer.")),
        ({"prompt_grad": "some"}, ("prompt_grad='some'", "'exact', 'none'")),
        ({"reuse_prompt_for": -1, "prompt_grad": "none"}, ("reuse_prompt_for=-1", "positive integer, or 0 for never")),
        ({"reuse_prompt_for": True, "prompt_grad": "none"}, ("reuse_prompt_for=True", "positive integer")),
        ({"reuse_prompt_for": 2}, ("reuse_prompt_for=2", "exact gradients flow into the prompt", 'prompt_grad="none"')),
        ({"on_drift": 3}, ("on_drift=3", "longstraw.Drift")),
        ({"grad_dtype": torch.int32}, ("torch.int32", "floating point")),
        ({"grad_dtype": "float7"}, ("'float7'", "'float64'")),
        ({"inner_backend": "inductorr"}, ("inner_backend='inductorr'", "inductor, ")),
        ({"inner_backend": "longstraw"}, ("inner_backend='longstraw'", "no torch.compile backend")),
        ({"state_tier": "/proc"}, ("state_tier='/proc'", "files can't be made")),
        ({"inner_backend": 3}, ("inner_backend=3", "or a function")),
        ({"state_tier": "hots"}, ("state_tier='hots'", "a folder that exists")),
        ({"state_tier": 3}, ("state_tier=3", "'device', 'host'")),
        ({"progress": 3}, ("progress=3", "True or False")),
        ({"check": "all"}, ("check='all'", "'numbers'")),
        ({"memory_budget": 40.5}, ("memory_budget=40.5", "a positive integer, the number of bytes, or text")),
        ({"rules": Rule(F.relu, lambda reader, node: ())}, ("rules is a Rule itself", "rules=(rule,)")),
        ({"rules": (3,)}, ("rules=(3,)", "longstraw.Rule")),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_option_that_is_unknown_or_impossible(options: dict[str, Any], parts: tuple[str, ...]) -> None:
    def step(weight: Tensor, x: Tensor) -> Tensor:
        return F.linear(x, weight).sum()

    with pytest.raises(errors.OptionsError) as caught:
        torch.compile(step, backend="longstraw", options=options)(torch.ones(2, 2), torch.ones(2, 2))
    error = caught.value
    assert all(part in str(error) for part in parts), str(error)


# --- errors in the middle ---


class Broken(Exception):
    """Raised by a kernel."""


def live_stores() -> list[Store]:
    gc.collect()
    return [thing for thing in gc.get_objects() if type(thing) is Store and not thing.released]


@pytest.mark.parametrize("when", ["forward", "backward"])
@pytest.mark.parametrize("count", sweep([1, 4, 9], always=[4]))
def test_an_error_in_the_middle_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch, when: str, count: int) -> None:
    model, inputs = model_and_inputs()
    step = compiled()
    step(model, **inputs).backward()
    before = [parameter.grad.clone() for parameter in model.parameters()]
    assert not live_stores()

    attend, calls = mixing.attention.attend, 0

    def break_down(*args: Any, **kwargs: Any) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == count:
            raise Broken
        return attend(*args, **kwargs)

    def fail() -> None:
        loss = None if when == "forward" else step(model, **inputs)
        with monkeypatch.context() as patch:
            patch.setattr(mixing.attention, "attend", break_down)
            if loss is None:
                loss = step(model, **inputs)
            loss.backward()

    with pytest.raises(Broken):
        fail()
    assert not live_stores()
    for parameter, gradient in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter.grad, gradient)

    model.zero_grad()
    step(model, **inputs).backward()
    for parameter, gradient in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter.grad, gradient)


def test_a_step_whose_loss_is_dropped_frees_its_state() -> None:
    model, inputs = model_and_inputs()
    loss = compiled()(model, **inputs)
    assert live_stores()
    del loss
    assert not live_stores()
