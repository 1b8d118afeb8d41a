"""Models with boundary state: recurrences and short convolutions, alone and beside attention, equal eager."""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.mamba2 import modeling_mamba2
from transformers.models.qwen3_5 import modeling_qwen3_5

import longstraw
from longstraw.arch import functions
from longstraw.errors import LongstrawError
from tests.equality import assert_equal, compare
from tests.models import zoo
from tests.small import HEADS, KEY_HEADS, Tiny, assert_same, gradients, inputs, step
from tests.steps import STEPS
from tests.sweeps import sweep

HYBRID = "qwen3_5_text"
# What isn't exact yet, and is refused.
REFUSED = {
    "inkling_text": "biases of pairs of tokens that depend on hidden values",
    "inkling2_text": "biases of pairs of tokens that depend on hidden values",
    "inkling2_loop_text": "biases of pairs of tokens that depend on hidden values",
    "qwen4_exp": "keys are chosen by their values",
    "qwen4_exp_text": "keys are chosen by their values",
    "rwkv": "a loop over tokens without a rule",
    "xlstm": "a loop over tokens without a rule",
    "zaya": "a convolution of a convolution of padding",
}
REPRESENTATIVE = (
    HYBRID, "kimi_linear", "mamba2", "falcon_h1", "jamba", "lfm2", "minimax", "recurrent_gemma",
)  # fmt: skip
SWEPT = [name for name in zoo.names() if zoo.mixing(name) == "recurrent"]


def swept(names: list[str]) -> list[Any]:
    return [pytest.param(name, marks=() if name in REPRESENTATIVE else pytest.mark.zoo) for name in names]


@pytest.mark.parametrize("name", swept([name for name in SWEPT if name not in REFUSED]))
def test_step_equals_eager(name: str) -> None:
    model = zoo.build(name)
    comparison = compare(
        STEPS["grpo"], model, STEPS["grpo"].inputs(model), options={"span_tokens": 7, "page_tokens": 4}
    )
    print(name, comparison.describe(), sep="\n")
    assert_equal(comparison, rtol=1e-10)


@pytest.mark.zoo
@pytest.mark.parametrize("name", [name for name in SWEPT if name in REFUSED])
def test_others_are_refused(name: str) -> None:
    model = zoo.build(name)
    with pytest.raises(LongstrawError):
        compare(STEPS["grpo"], model, STEPS["grpo"].inputs(model), options={"span_tokens": 7})


def short_step(model: nn.Module, prompt: Tensor, responses: Tensor, weights: Tensor, **model_inputs: Any) -> Tensor:
    """As short as it gets: the model's own defaults (a cache is on), a weighted sum."""
    ids = torch.cat([prompt.expand(responses.shape[0], -1), responses], 1)
    logits = model(input_ids=ids, **model_inputs).logits[:, prompt.shape[1] - 1 : -1]
    return (torch.log_softmax(logits, -1).gather(-1, responses[..., None]).squeeze(-1) * weights[:, None]).sum()


def short_inputs(prompt: int, response: int, group: int = 3, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed + prompt + response)
    ids = [torch.randint(5, zoo.VOCAB, shape, generator=generator) for shape in ((1, prompt), (group, response))]
    return (*ids, torch.randn(group, generator=generator, dtype=torch.float64))


def compiled(span_tokens: int, function: Callable = short_step, **options: Any) -> Callable:
    torch._dynamo.reset()
    options = {"span_tokens": span_tokens, "grad_dtype": torch.float64, **options}
    return torch.compile(function, backend="longstraw", options=options)


def assert_grads_equal(found: dict[str, Any], expected: dict[str, Any], rtol: float = 1e-10) -> None:
    floor = 1e-4 * max(float(g.norm()) for g in expected.values() if g is not None)
    for name, one in expected.items():
        other = found[name]
        assert (one is None) == (other is None), name
        if one is not None:
            assert float((one - other).norm()) <= rtol * max(float(one.norm()), floor), name


def copies(grads: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    return {name: None if grad is None else grad.clone() for name, grad in grads.items()}


@pytest.mark.parametrize("span_tokens", sweep([1, 7, 64], always=[7]))
def test_every_length_equals_eager(span_tokens: int) -> None:
    model = zoo.build(HYBRID)
    compiled_step = compiled(span_tokens)
    for prompt in (1, 3, 63, 64, 65, 130):
        for response in (1, 2, 5):
            if span_tokens == 1 and prompt * response > 65:
                continue  # slow, and the same code
            args = short_inputs(prompt, response)
            loss, expected = gradients(short_step, model, *args)
            expected = copies(expected)
            found_loss, found = gradients(compiled_step, model, *args)
            torch.testing.assert_close(found_loss, loss, rtol=1e-12, atol=1e-14)
            assert_grads_equal(found, expected)
            named = [name for name, grad in found.items() if grad is not None]
            assert all(any(part in name for name in named) for part in ("A_log", "dt_bias", "conv1d", "norm"))


@pytest.mark.parametrize("name", sweep([HYBRID, "mamba2", "jamba", "lfm2", "minimax"], always=[HYBRID, "lfm2"]))
def test_left_padding_equals_eager(name: str) -> None:
    """Padding enters neither a convolution's window nor a recurrence; rows differ in how much they have."""
    model = zoo.build(name)
    prompt, answers, weights = short_inputs(12, 4)
    rows = torch.cat([prompt.expand(3, -1), answers], 1)
    mask = torch.ones_like(rows)
    for row, pads in enumerate((3, 0, 3)):
        mask[row, :pads] = 0

    def padded(model: nn.Module, rows: Tensor, count: int, mask: Tensor, weights: Tensor) -> Tensor:
        logits = model(input_ids=rows, attention_mask=mask, use_cache=False).logits[:, -count - 1 : -1]
        responses = rows[:, -count:]
        return (torch.log_softmax(logits, -1).gather(-1, responses[..., None]).squeeze(-1) * weights[:, None]).sum()

    args = (rows, 4, mask, weights)
    loss, expected = gradients(padded, model, *args)
    expected = copies(expected)
    found_loss, found = gradients(compiled(5, padded, page_tokens=2), model, *args)
    torch.testing.assert_close(found_loss, loss, rtol=1e-12, atol=1e-14)
    assert all(grad is None or torch.isfinite(grad).all() for grad in found.values())
    assert_grads_equal(found, expected)


@pytest.mark.parametrize("replay_rows", sweep([1, 2, "auto"], always=[2]))
@pytest.mark.parametrize("boundary_every", sweep([1, 2, 5, "auto"], always=[2, "auto"]))
def test_batches_and_thinned_boundary_states_change_nothing(boundary_every: Any, replay_rows: Any) -> None:
    model, args = zoo.build(HYBRID), short_inputs(41, 9, group=4)
    _, expected = gradients(short_step, model, *args)
    expected = copies(expected)
    options = {"boundary_every": boundary_every, "replay_rows": replay_rows}
    _, found = gradients(compiled(4, **options), model, *args)
    assert_grads_equal(found, expected)


def scores(model: nn.Module, prompt: Tensor, responses: Tensor) -> Tensor:
    ids = torch.cat([prompt.expand(responses.shape[0], -1), responses], 1)
    logits = model(input_ids=ids, use_cache=False).logits[:, prompt.shape[1] - 1 : -1]
    return torch.log_softmax(logits, -1).gather(-1, responses[..., None]).squeeze(-1)


@torch.no_grad()
def test_permuted_responses_are_bit_equal() -> None:
    model, (prompt, responses, _) = zoo.build(HYBRID), short_inputs(20, 6, group=4)
    run = compiled(8, scores, replay_rows=1)
    order = torch.tensor([2, 0, 3, 1])
    assert torch.equal(run(model, prompt, responses)[order], run(model, prompt, responses[order]))


def test_one_step_leaves_nothing_to_the_next() -> None:
    model, run = zoo.build(HYBRID), compiled(8)
    first, second = short_inputs(20, 6, seed=1), short_inputs(20, 6, seed=2)
    fresh, grads = gradients(run, model, *second)
    grads = copies(grads)
    gradients(run, model, *first)
    again, found = gradients(run, model, *second)
    assert torch.equal(fresh, again)
    assert all(grad is None or torch.equal(grad, found[name]) for name, grad in grads.items())


@pytest.mark.parametrize("name", ["recurrent_gemma", HYBRID])
def test_other_lengths_and_calls_do_not_compile_again(name: str) -> None:
    from torch._dynamo.utils import counters

    model, run = zoo.build(name), compiled(8)
    run = functools.partial(run, use_cache=False)  # one of them would keep what its cache holds in the model itself
    gradients(run, model, *short_inputs(20, 6))
    graphs = counters["stats"]["unique_graphs"]
    for prompt, response, group in ((20, 6, 3), (33, 9, 2), (64, 5, 4)):
        gradients(run, model, *short_inputs(prompt, response, group))
    assert counters["stats"]["unique_graphs"] == graphs


def test_other_backends_trace_the_models_own_functions() -> None:
    model, (prompt, responses, _) = zoo.build(HYBRID), short_inputs(12, 4)
    gradients(compiled(8), model, *short_inputs(12, 4))
    names: list[str] = []

    def record(gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
        names.extend(str(node.target) for node in gm.graph.nodes)
        return gm.forward

    torch._dynamo.reset()
    function = modeling_qwen3_5.torch_chunk_gated_delta_rule
    with torch.no_grad():
        found = torch.compile(scores, backend=record)(model, prompt, responses)
        torch.testing.assert_close(found, scores(model, prompt, responses))
    assert names and not any("longstraw" in name for name in names)
    assert modeling_qwen3_5.torch_chunk_gated_delta_rule is function


class Recurrent(Tiny):
    """Beside attention a convolution and a gated delta rule; the state before `stop` may count as a constant."""

    stop = 0

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(16, 16, 4, groups=16, padding=3).double()
        self.gates = nn.Linear(16, 4).double()

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(self.query(x), HEADS), *(self.heads(f(x), KEY_HEADS) for f in (self.key, self.value))
        k, v = (torch.cat([t[:, :, : self.stop].detach(), t[:, :, self.stop :]], 2) if self.stop else t for t in (k, v))
        k, v = (t.repeat_interleave(HEADS // KEY_HEADS, 1) for t in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        mixed = x.transpose(1, 2)
        if self.stop:
            mixed = torch.cat([mixed[..., : self.stop].detach(), mixed[..., self.stop :]], -1)
        mixed = torch.tanh(self.conv(mixed)[..., : x.shape[1]].transpose(1, 2))
        q, k, v = (t.unflatten(-1, (2, 8)) for t in (mixed, F.normalize(mixed, dim=-1), x))
        decay, beta = -F.softplus(self.gates(x)).chunk(2, -1)[0], torch.sigmoid(self.gates(x)).chunk(2, -1)[1]
        rule = modeling_qwen3_5.torch_chunk_gated_delta_rule
        if self.stop:
            early = [t[:, : self.stop] for t in (q, k, v, decay, beta)]
            late = [t[:, self.stop :] for t in (q, k, v, decay, beta)]
            first, state = rule(*early, output_final_state=True)
            second, _ = rule(*late, initial_state=state.detach())
            mixed = torch.cat([first, second], 1)
        else:
            mixed, _ = rule(q, k, v, decay, beta)
        return out + self.heads(mixed.flatten(2), HEADS)


@pytest.fixture
def float64_inside() -> Any:
    from tests.models import float64

    with float64.float64_inside(HYBRID):
        yield


@pytest.mark.usefixtures("float64_inside")
@pytest.mark.parametrize("span_tokens", sweep([1, 3, 100], always=[3]))
def test_none_equals_eager_with_the_prompts_state_detached(span_tokens: int) -> None:
    model, reference = Recurrent(), Recurrent()
    reference.load_state_dict(model.state_dict())
    reference.stop = 8  # the last prompt token predicts the first response token: it is replayed
    loss, expected = gradients(step, reference, *inputs(prompt=9))
    run = compiled(span_tokens, step, prompt_grad="none", page_tokens=2)
    found_loss, found = gradients(run, model, *inputs(prompt=9))
    torch.testing.assert_close(found_loss, loss, rtol=1e-12, atol=0)
    assert_grads_equal(found, expected)
    assert_same(model, *inputs(prompt=9))


class RunningSum(Tiny):
    def attend(self, x: Tensor) -> Tensor:
        return super().attend(x) + self.heads(torch.tanh(self.out(x).cumsum(1)), HEADS)


def test_running_sum_of_hidden_values() -> None:
    assert_same(RunningSum(), *inputs())


@pytest.mark.parametrize("smoothed", ["log-probabilities", "weights"])
def test_a_convolution_in_the_loss(smoothed: str) -> None:
    """What the loss mixes over tokens is no part of the model."""

    def smooth(x: Tensor) -> Tensor:
        return F.conv1d(x[:, None], x.new_tensor([[[0.25, 0.5, 0.25]]]), padding=1)[:, 0]

    def loss(model: nn.Module, prompt: Tensor, responses: Tensor, weights: Tensor) -> Tensor:
        logits = model(torch.cat([prompt.expand(responses.shape[0], -1), responses], 1))[:, prompt.shape[1] - 1 : -1]
        logp = torch.log_softmax(logits, -1).gather(-1, responses[..., None]).squeeze(-1)
        return (logp * smooth(weights) if smoothed == "weights" else smooth(logp) * weights).sum()

    assert_same(Tiny(), *inputs(), function=loss)


def leaky(x: Tensor, rate: Tensor) -> Tensor:
    """A recurrence that no table knows."""
    return leaky_step(x, rate, x.new_zeros(x.shape[0], x.shape[2]))[0]


def leaky_step(x: Tensor, rate: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    outs = []
    for t in range(x.shape[1]):
        state = torch.tanh(state * rate + x[:, t])
        outs.append(state)
    return torch.stack(outs, 1), state


LEAKY = longstraw.Scan(leaky, leaky_step, state=lambda x, rate: x.new_zeros(x.shape[0], x.shape[2]))


class Leaky(Tiny):
    def attend(self, x: Tensor) -> Tensor:
        return super().attend(x) + self.heads(leaky(x, self.out.bias), HEADS)


def test_a_users_scan() -> None:
    torch._dynamo.reset()
    with pytest.raises(LongstrawError, match=r"loops over tokens.*longstraw.Scan"):
        assert_same(Leaky(), *inputs())
    for prompt, response in ((9, 4), (20, 7)):
        torch._dynamo.reset()
        assert_same(Leaky(), *inputs(prompt, response), rules=(LEAKY,))


def test_a_state_that_leaves_the_model_is_refused() -> None:
    class Returns(Recurrent):
        def attend(self, x: Tensor) -> Tensor:
            q = k = v = x.unflatten(-1, (2, 8))
            decay, beta = self.gates(x).sigmoid().neg().chunk(2, -1)
            out, state = modeling_qwen3_5.torch_chunk_gated_delta_rule(
                q, k, v, decay, beta.neg(), output_final_state=True
            )
            return self.heads(out.flatten(2) + state.sum(), HEADS)

    torch._dynamo.reset()
    with pytest.raises(LongstrawError, match="state after the last token leaves the model"):
        assert_same(Returns(), *inputs())


def test_a_function_that_computes_something_else_is_left_alone() -> None:
    entry = next(e for e in functions.FUNCTIONS if e.name == "torch_chunk_gated_delta_rule")

    def other(*args: Any, **kwargs: Any) -> Any:
        out, state = modeling_qwen3_5.torch_chunk_gated_delta_rule(*args, **kwargs)
        return 2 * out, state

    assert functions._agrees(modeling_qwen3_5.torch_chunk_gated_delta_rule, entry)
    assert not functions._agrees(other, entry)


def test_explain_lists_boundary_states() -> None:
    model = zoo.build(HYBRID, layers=4)
    text = str(longstraw.explain(STEPS["grpo"].function, copy.deepcopy(model), **STEPS["grpo"].inputs(model)))
    assert "model.model.layers.{0, 2}.linear_attn" in text and "model.model.layers.{1, 3}.self_attn" in text
    assert "4 x 16 x 16 = 1024 numbers of gated_delta_rule" in text
    assert "128 x 3 = 384 numbers of causal_conv" in text


class Mixed(Tiny):
    """A mix of tokens before attention, so that the first tokens matter too."""

    mix: Callable[[Mixed, Tensor], Tensor]

    def __init__(self, mix: Callable[[Mixed, Tensor], Tensor]) -> None:
        super().__init__()
        self.mix = mix
        self.conv, self.bias = nn.Conv1d(16, 16, 4, groups=16).double(), nn.Parameter(torch.randn(16, 1).double())
        self.learned = nn.Parameter(torch.randn(16).double())
        self.positions = nn.Parameter(torch.randn(1, 64, 16).double())

    def attend(self, x: Tensor) -> Tensor:
        return super().attend(x + torch.tanh(self.mix(self, x)))


EXACT: dict[str, Callable[[Mixed, Tensor], Tensor]] = {
    "padded convolution": lambda m, x: m.conv(F.pad(x.transpose(1, 2), (3, 0))).transpose(1, 2),
    "padding wider than the kernel": lambda m, x: m.conv(F.pad(x.mT, (5, 0)))[..., 2:].mT,
    "running sum": lambda m, x: x.cumsum(1),
    "running sum of bools in another dtype": lambda m, x: x * (x > 0).cumsum(1, dtype=torch.float64),
    "known scan": lambda m, x: leaky(x, m.learned),
}
WRONG: dict[str, Callable[[Mixed, Tensor], Tensor]] = {
    "a convolution's output padded": lambda m, x: F.pad(m.conv(x.mT), (3, 0)).mT,
    "zeros in place of the first token": lambda m, x: F.pad(x[:, 1:], (0, 0, 1, 0)),
    "padding that is no longer zero": lambda m, x: m.conv(F.pad(F.pad(x.mT, (1, 0)) + m.bias, (2, 0))).mT,
    "a token shift": lambda m, x: F.pad(x, (0, 0, 1, 0))[:, :-1],
    "a convolution that sees the next token": lambda m, x: m.conv(F.pad(x.mT, (2, 1))).mT,
    "a table cut to the row": lambda m, x: x + m.positions[:, : x.shape[1]],
}


@pytest.mark.parametrize("name", EXACT)
def test_what_mixes_before_attention_is_exact(name: str) -> None:
    torch._dynamo.reset()
    assert_same(Mixed(EXACT[name]), *inputs(), rules=(LEAKY,))


@pytest.mark.parametrize("name", WRONG)
def test_what_is_not_causal_or_starts_elsewhere_is_refused(name: str) -> None:
    torch._dynamo.reset()
    with pytest.raises(LongstrawError):
        assert_same(Mixed(WRONG[name]), *inputs())


def started(x: Tensor, rate: Tensor) -> Tensor:
    return leaky_step(x, rate, rate.expand(x.shape[0], -1))[0]


def averaged(x: Tensor, rate: Tensor) -> Tensor:
    return leaky(x - x.mean(0), rate)


BAD_RULES = {
    "isn't zero": longstraw.Scan(started, leaky_step, state=lambda x, rate: rate.expand(x.shape[0], -1)),
    "no dim of rows": longstraw.Scan(started, leaky_step, state=lambda x, rate: x.new_zeros(x.shape[2])),
    "returns a state": longstraw.Scan(
        started, lambda *a: (leaky_step(*a)[0], a[-1][:1]), state=lambda x, rate: x.new_zeros(x.shape[0], x.shape[2])
    ),
    "returns an output": longstraw.Scan(
        started, leaky_step, state=lambda x, rate: x.new_zeros(x.shape[0], x.shape[2]), output=lambda x, rate: rate
    ),
    "doesn't compute what started does": longstraw.Scan(
        started, leaky_step, state=lambda x, rate: x.new_zeros(x.shape[0], x.shape[2])
    ),
    "changes the state that it is given": longstraw.Scan(
        started,
        lambda x, rate, state: (leaky_step(x, rate, state)[0], state.add_(1)),
        state=lambda x, rate: x.new_zeros(x.shape[0], x.shape[2]),
    ),
    "has other gradients": longstraw.Scan(
        leaky,
        lambda x, rate, state: leaky_step(x, rate, state.detach()),
        state=lambda x, rate: x.new_zeros(x.shape[0], x.shape[2]),
    ),
    "doesn't compute what leaky does": longstraw.Scan(
        leaky,
        lambda x, rate, state: leaky_step(x.abs(), rate, state),
        state=lambda x, rate: x.new_zeros(x.shape[0], x.shape[2]),
    ),
    "spans one after the other": longstraw.Scan(
        leaky,
        lambda x, rate, state: (leaky(x, rate), leaky(x, rate)[:, -1]),
        state=lambda x, rate: x.new_zeros(x.shape[0], x.shape[2]),
    ),
    "mixes rows": longstraw.Scan(
        averaged,
        lambda x, rate, state: leaky_step(x - x.mean(0), rate, state),
        state=lambda x, rate: x.new_zeros(x.shape[0], x.shape[2]),
    ),
    "fails on small inputs": longstraw.Scan(started, leaky_step, state=lambda x, rate: x.new_zeros(x.shape[0], 99)),
}


BAD_RULES |= {
    "its state fails on small inputs": longstraw.Scan(leaky, leaky_step, state=lambda x: x.new_zeros(1)),
    "its output fails on small inputs": longstraw.Scan(
        leaky, leaky_step, state=lambda x, rate: x.new_zeros(x.shape[0], x.shape[2]), output=lambda x: x
    ),
    "its state returns a int": longstraw.Scan(leaky, leaky_step, state=lambda x, rate: 0),
}


@pytest.mark.parametrize("message", BAD_RULES)
def test_a_scan_that_contradicts_itself_is_refused(message: str, capfd: pytest.CaptureFixture[str]) -> None:
    torch._dynamo.reset()
    rule = BAD_RULES[message]
    with pytest.raises(LongstrawError, match=message) as error:
        assert_same(Mixed(lambda m, x: rule.function(x, m.learned)), *inputs(), rules=(rule,))
    text = str(error.value)
    assert f"Scan of {rule.function.__name__} " in text and "A Scan must satisfy" in text and "Rule(op" not in text
    assert "test_recurrent.py" in text
    assert "Traceback" not in capfd.readouterr().err


def in_chunks(x: Tensor, rate: Tensor) -> Tensor:
    if x.shape[1] % 16:
        raise ValueError("a chunk has 16 tokens")
    return leaky(x, rate)


def on_another_device(x: Tensor, rate: Tensor) -> Tensor:
    raise RuntimeError("no kernel for the CPU")


@pytest.mark.parametrize("right", [True, False])
def test_a_scan_is_tried_with_as_many_tokens_as_its_function_takes(right: bool) -> None:
    rule = longstraw.Scan(
        in_chunks,
        lambda x, rate, state: leaky_step(x, rate if right else 2 * rate, state),
        state=lambda x, rate: x.new_zeros(x.shape[0], x.shape[2]),
    )
    torch._dynamo.reset()
    refused = pytest.raises(LongstrawError, match="doesn't compute what in_chunks does")
    with contextlib.nullcontext() if right else refused:
        assert_same(Mixed(lambda m, x: in_chunks(x, m.learned)), *inputs(11, 5), rules=(rule,))


def test_a_scan_that_cannot_be_tried_says_so() -> None:
    rule = longstraw.Scan(on_another_device, leaky_step, state=lambda x, rate: x.new_zeros(x.shape[0], x.shape[2]))
    torch._dynamo.reset()
    compiled = torch.compile(step, backend="longstraw", options={"rules": (rule,)})
    model = Mixed(lambda m, x: on_another_device(x, m.learned))
    with pytest.warns(match=r"(?s)could not be compared with it.*no kernel for the CPU.*test_recurrent"):
        found = compiled(model, *inputs())
    model.mix = lambda m, x: leaky(x, m.learned)
    torch.testing.assert_close(found, step(model, *inputs()), rtol=1e-12, atol=1e-12)


class Holder:
    def method(self, x: Tensor) -> Tensor:
        return x


@pytest.mark.parametrize("function", [Holder().method, Holder.method, torch.cumsum])
def test_a_scan_of_a_method_is_refused(function: Callable[..., Tensor]) -> None:
    with pytest.raises(LongstrawError, match="not a plain function"):
        longstraw.Scan(function, leaky_step, state=lambda x: x[:, 0])


def chunked(x: Tensor, rate: Tensor, chunk: int = 4) -> Tensor:
    return leaky(x, rate)


@pytest.mark.parametrize("given", [{"chunk": 2}, {}])
def test_a_scan_that_is_given_a_number_is_refused_and_its_default_is_not(given: dict[str, int]) -> None:
    torch._dynamo.reset()
    rule = longstraw.Scan(chunked, leaky_step, state=lambda x, rate: x.new_zeros(x.shape[0], x.shape[2]))
    model = Mixed(lambda m, x: chunked(x, m.learned, **given))
    if not given:
        assert_same(model, *inputs(), rules=(rule,))
        return
    with pytest.raises(LongstrawError, match="value of type int") as refused:
        assert_same(model, *inputs(), rules=(rule,))
    assert "test_recurrent.py" in str(refused.value)


def test_the_callers_autocast_does_not_decide_which_functions_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functions, "_compared", {})
    entry = next(e for e in functions.FUNCTIONS if e.name == "mamba2_chunk_scan")
    with torch.autocast("cpu", torch.bfloat16), torch.device("meta"):
        assert functions._agrees(modeling_mamba2.mamba2_chunk_scan, entry)


@pytest.mark.parametrize(("name", "kind"), [(HYBRID, "old_policy_inside"), ("mamba2", "inputs_embeds")])
def test_steps_that_tell_branches_or_sizes_in_another_way(name: str, kind: str) -> None:
    model = zoo.build(name)
    assert_equal(compare(STEPS[kind], model, STEPS[kind].inputs(model), options={"span_tokens": 7}), rtol=1e-10)


def test_results_for_padding_are_refused() -> None:
    def beyond(model: nn.Module, prompt: Tensor, responses: Tensor, weights: Tensor) -> Tensor:
        ids = torch.cat([prompt.expand(responses.shape[0], -1), responses], 1)
        logits = F.pad(model(ids), (0, 0, 0, 1))[:, prompt.shape[1] + 1 :]
        return (torch.log_softmax(logits, -1).gather(-1, responses[..., None]).squeeze(-1) * weights).sum()

    torch._dynamo.reset()
    with pytest.raises(LongstrawError, match="has results for the tokens"):
        assert_same(Tiny(), *inputs(), function=beyond)


def test_a_function_of_the_kernel_library_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library runs on a GPU only; here a module of its name stands for it, whose function must not be called."""
    library = types.ModuleType("fla.ops.gated_delta_rule")
    exec("def chunk_gated_delta_rule(q, k, v, g, beta, **kwargs): raise AssertionError('called')", vars(library))
    monkeypatch.setitem(sys.modules, library.__name__, library)

    def by_library(m: Mixed, x: Tensor, rule: Callable) -> Tensor:
        q, v = x.unflatten(-1, (2, 8)), m.out(x).unflatten(-1, (2, 8))
        gates = m.bias.flatten()[:2].sigmoid().expand(*x.shape[:2], 2)
        out, _ = rule(q, F.normalize(v, dim=-1), v, g=-gates, beta=gates, use_qk_l2norm_in_kernel=True)
        return out.flatten(2)

    reference = Mixed(lambda m, x: by_library(m, x, functions.delta_rule_of_library))
    model = Mixed(lambda m, x: by_library(m, x, library.chunk_gated_delta_rule))
    loss, expected = gradients(step, reference, *inputs())
    torch._dynamo.reset()
    options = {"span_tokens": 4, "page_tokens": 2}
    found_loss, found = gradients(torch.compile(step, backend="longstraw", options=options), model, *inputs())
    torch.testing.assert_close(found_loss, loss, rtol=1e-12, atol=0)
    assert_grads_equal(found, expected)


def test_a_model_of_ones_own_with_a_known_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of a model's code under any module name: the function's numbers decide."""
    module = types.ModuleType("somebodys_model")
    vars(module)["torch_chunk_gated_delta_rule"] = modeling_qwen3_5.torch_chunk_gated_delta_rule
    monkeypatch.setitem(sys.modules, module.__name__, module)
    names = {s.function for s in functions.opaque_functions()}
    assert module.torch_chunk_gated_delta_rule in names
