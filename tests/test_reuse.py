"""reuse_prompt_for: a prompt that is read again is the old weights' state; it is counted, told of, and let go of."""

from __future__ import annotations

import copy
import gc
import logging
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache

import longstraw
from longstraw import Drift, Options
from longstraw.runtime import mixing, reuse, transaction
from tests.models import zoo
from tests.small import HEADS, KEY_HEADS, VOCABULARY, Tiny, step
from tests.steps import STEPS, clipped, row_mean, selected_logp
from tests.sweeps import sweep

OPTIONS: dict[str, Any] = {"prompt_grad": "none", "span_tokens": 4, "page_tokens": 2, "grad_dtype": torch.float64}
PROMPT = 9
Arguments = tuple[Tensor, ...]


@pytest.fixture(autouse=True, scope="module")
def fresh_dynamo() -> Iterator[None]:
    """Compile each step once for all tests here: they differ in what they call it with."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Captures:
    """Every state of a prompt's beginning that was computed, without keeping it alive."""

    def __init__(self) -> None:
        self.stores: list[weakref.ref[transaction.Store]] = []
        self.most_alive = 0

    @property
    def count(self) -> int:
        return len(self.stores)

    def alive(self) -> int:
        found = [store() for store in self.stores]
        return sum(store is not None and not store.released for store in found)


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> Captures:
    found = Captures()
    make = transaction.Store

    def watched(*args: Any, **kwargs: Any) -> transaction.Store:
        store = make(*args, **kwargs)
        if kwargs["start"] == 0 and kwargs["stop"] > 0:
            found.stores.append(weakref.ref(store))
            found.most_alive = max(found.most_alive, found.alive())
        return store

    monkeypatch.setattr(transaction, "Store", watched)
    return found


@pytest.fixture
def lines() -> Iterator[list[logging.LogRecord]]:
    """What is logged."""
    found: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = found.append  # type: ignore[method-assign]
    logger = logging.getLogger("longstraw")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield found
    logger.removeHandler(handler)
    logger.setLevel(level)


class Shared:
    """`step` for a Tiny, compiled to read a prompt twice after its capture, and the drifts that it reported."""

    def __init__(self) -> None:
        self.drifts: list[Drift] = []
        self.step = compiled(step, k=2, on_drift=self.drifts.append)

    def __call__(self, model: nn.Module, *args: Tensor) -> Tensor:
        return self.step(model, *args)


@pytest.fixture(scope="module")
def compiled_once() -> Shared:
    return Shared()


@pytest.fixture
def shared(compiled_once: Shared) -> Shared:
    compiled_once.drifts.clear()
    return compiled_once


def compiled(function: Callable[..., Any], k: int, **options: Any) -> Callable[..., Any]:
    return torch.compile(function, backend="longstraw", options={**OPTIONS, "reuse_prompt_for": k, **options})


def results(function: Callable[..., Any], model: nn.Module, *args: Any, **kwargs: Any) -> list[Tensor | None]:
    """Loss and gradients of one call."""
    model.zero_grad()
    loss = function(model, *args, **kwargs)
    loss.backward()
    return [loss.detach(), *(None if p.grad is None else p.grad.clone() for p in model.parameters())]


def assert_close(found: list[Tensor | None], expected: list[Tensor | None]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-11)


def assert_same_bits(found: list[Tensor | None], expected: list[Tensor | None]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one is other is None or torch.equal(one, other)


def change(model: nn.Module, seed: int = 0, size: float = 0.05) -> None:
    """What an optimizer does to the weights."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p += size * p.std().nan_to_num() * torch.randn(p.shape, generator=generator, dtype=p.dtype)


def inputs(prompt: int = 0, seed: int = 0, *, response: int = 4, group: int = 3) -> Arguments:
    """The prompt of a number `[1, P]`, responses `[G, R]` and their weights `[G, R]`."""
    tokens = torch.randint(VOCABULARY, (1, PROMPT), generator=torch.Generator().manual_seed(100 + prompt))
    generator = torch.Generator().manual_seed(seed)
    responses = torch.randint(VOCABULARY, (group, response), generator=generator)
    return tokens, responses, torch.randn(group, response, generator=generator, dtype=torch.float64)


class Frozen(Tiny):
    """The weights of a model, with keys and values of the first tokens that are given for each attention."""

    def __init__(self, weights: nn.Module, given: list[tuple[Tensor, Tensor]] | None = None) -> None:
        super().__init__()
        self.load_state_dict(weights.state_dict())
        self.given = given

    def forward(self, ids: Tensor) -> Tensor:
        self.computed: list[tuple[Tensor, Tensor]] = []
        return super().forward(ids)

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(self.query(x), HEADS), *(self.heads(f(x), KEY_HEADS) for f in (self.key, self.value))
        number = len(self.computed)
        self.computed.append((k.detach(), v.detach()))
        if self.given is not None:
            stop = self.given[number][0].shape[2]
            k, v = (torch.cat([old, new[:, :, stop:]], 2) for old, new in zip(self.given[number], (k, v), strict=True))
        k, v = (t.repeat_interleave(HEADS // KEY_HEADS, 1) for t in (k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def reference(model: nn.Module, old: nn.Module, args: Arguments) -> Frozen:
    """The model with the prompt's keys and values (all but its last token's) of an older one, as constants."""
    before = Frozen(old)
    step(before, *args)
    stop = args[0].shape[1] - 1
    return Frozen(model, [(k[:, :, :stop], v[:, :, :stop]) for k, v in before.computed])


def expected(model: nn.Module, old: nn.Module, args: Arguments) -> list[Tensor | None]:
    return results(step, reference(model, old, args), *args)


# --- what is computed ---


def test_unchanged_weights_give_the_same_bits_and_no_drift(shared: Shared, captures: Captures) -> None:
    model, args = Tiny(), inputs(1)
    first = results(shared, model, *args)
    assert_close(first, expected(model, model, args))
    for number in range(1, 4):
        assert_same_bits(results(shared, model, *args), first)
        assert captures.count == (2 if number == 3 else 1)
    assert shared.drifts == [Drift(steps=3, loss=0.0, log_prob=0.0)]


def test_a_prompt_read_again_is_the_old_weights_state(shared: Shared, captures: Captures) -> None:
    model = Tiny()
    old = copy.deepcopy(model)
    results(shared, model, *inputs(2))
    for number in (1, 2):
        change(model, number)
        args = inputs(2, number, response=3 + number, group=1 + number)
        assert_close(results(shared, model, *args), expected(model, old, args))
    assert captures.count == 1

    change(model, 3)
    args = inputs(2, 3)
    found = results(shared, model, *args)
    assert_close(found, expected(model, model, args))
    assert captures.count == 2
    assert captures.alive() == captures.most_alive == 1  # the old state goes before the new one is allocated
    (drift,) = shared.drifts
    stale = step(reference(model, old, args), *args).detach()
    assert drift.steps == 3
    assert drift.loss == pytest.approx(float((stale - found[0]).abs() / found[0].abs()), rel=1e-9)
    one_each = (*args[:2], torch.ones_like(args[2]))  # with weights of one the loss is the sum of log-probabilities
    gap = (step(reference(model, old, args), *one_each) - step(model, *one_each)).detach()
    assert drift.log_prob >= float(gap.abs()) / args[1].numel() > 0


def placed(
    model: nn.Module,
    prompt: Tensor,
    responses: Tensor,
    mask: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    positions: Tensor,
    seen: Tensor,
) -> Tensor:
    """The GRPO loss of rows with positions and a mask of their own."""
    ids = torch.cat([prompt.expand(responses.shape[0], -1), responses], 1)
    outputs = model(input_ids=ids, position_ids=positions, attention_mask=seen, use_cache=False)
    logits = outputs.logits[:, prompt.shape[1] - 1 : -1]
    return row_mean(clipped(selected_logp(logits, responses), old_logp, advantages), mask)


def placed_inputs(model: nn.Module, **sizes: int) -> dict[str, Any]:
    given = STEPS["grpo"].inputs(model, **sizes)
    group, tokens = given["responses"].shape[0], given["prompt"].shape[1] + given["responses"].shape[1]
    positions = torch.arange(tokens).repeat(group, 1)
    return given | {"positions": positions, "seen": torch.ones_like(positions)}


def after_old_prompt(model: nn.Module, old: nn.Module, given: dict[str, Any]) -> Tensor:
    """`placed`, with the prompt's keys and values computed by an older model, in transformers' own cache."""
    prompt, responses = given["prompt"], given["responses"]
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        old(input_ids=prompt[:, :-1], past_key_values=cache, use_cache=True)
    cache.batch_repeat_interleave(responses.shape[0])
    ids = torch.cat([prompt[:, -1:].expand(responses.shape[0], -1), responses], 1)
    logp = selected_logp(model(input_ids=ids, past_key_values=cache, use_cache=True).logits[:, :-1], responses)
    return row_mean(clipped(logp, given["old_logp"], given["advantages"]), given["mask"])


@pytest.mark.parametrize("name", sweep(["llama", "mistral"], always=["llama"]))
def test_it_equals_transformers_cache_of_the_old_weights(name: str, captures: Captures) -> None:
    model = zoo.build(name, layers=1)
    old = copy.deepcopy(model)
    found = compiled(placed, k=5, state_tier="host")
    fresh = results(found, model, **placed_inputs(model))
    change(model)
    given = placed_inputs(model, group=2, response=7) | {"prompt": placed_inputs(model)["prompt"]}
    assert_close(results(found, model, **given), results(lambda model: after_old_prompt(model, old, given), model))
    assert captures.count == 1

    model.load_state_dict(old.state_dict())
    results(found, model, **{**given, "positions": given["positions"] * 2})
    assert captures.count == 2, "other positions are captured"
    unseen = given["seen"].clone()
    unseen[:, :3] = 0
    results(found, model, **{**given, "positions": given["positions"] * 2, "seen": unseen})
    assert captures.count == 3, "another mask is captured"
    assert_same_bits(results(found, model, **placed_inputs(old)), fresh)
    assert captures.count == 4


def test_boundary_states_are_read_again_too_under_adapters(captures: Captures) -> None:
    model = zoo.build("qwen3_5_text")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("q_proj" in name or "out_proj" in name)
    found = compiled(STEPS["grpo"].function, k=2, span_tokens=5)
    given = STEPS["grpo"].inputs(model, prompt=12, response=3)
    first = results(found, model, **given)
    assert_same_bits(results(found, model, **given), first)
    old = copy.deepcopy(model)
    change(model)
    loss = results(found, model, **given)[0]
    assert captures.count == 1

    prompt, responses = given["prompt"], given["responses"]
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        old(input_ids=prompt[:, :-1], past_key_values=cache, use_cache=True)
        cache.reorder_cache(torch.zeros(responses.shape[0], dtype=torch.long))
        ids = torch.cat([prompt[:, -1:].expand(responses.shape[0], -1), responses], 1)[:, :-1]
        logits = [model(input_ids=at, past_key_values=cache, use_cache=True).logits for at in ids.split(1, 1)]
        logp = selected_logp(torch.cat(logits, 1), responses)
        want = row_mean(clipped(logp, given["old_logp"], given["advantages"]), given["mask"])
    torch.testing.assert_close(loss, want, rtol=1e-10, atol=0)
    assert abs(loss - first[0]) > 1e-4 * abs(first[0])


def joined(model: nn.Module, rows: Tensor, responses: Tensor, weights: Tensor) -> Tensor:
    logits = model(torch.cat([rows, responses], 1))[:, rows.shape[1] - 1 : -1]
    return (selected_logp(logits, responses) * weights).sum()


def test_prompts_that_begin_alike_read_their_beginning_again(captures: Captures) -> None:
    prompts = torch.randint(VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(3))
    prompts[1, :6], prompts[1, 6] = prompts[0, :6], (prompts[0, 6] + 1) % VOCABULARY
    _, responses, weights = inputs(group=4)
    args = (prompts.repeat_interleave(2, 0), responses, weights)
    model = Tiny()
    before = Frozen(model)
    found = compiled(joined, k=1)
    results(found, model, *args)
    change(model)
    joined(before, *args)
    beginning = [(k[:, :, :6], v[:, :, :6]) for k, v in before.computed]
    now = Frozen(model, beginning)  # what follows the common beginning is captured by the new weights on top of it
    joined(now, *args)
    given = [
        (torch.cat([old_k, k[:, :, 6:11]], 2), torch.cat([old_v, v[:, :, 6:11]], 2))
        for (old_k, old_v), (k, v) in zip(beginning, now.computed, strict=True)
    ]
    assert_close(results(found, model, *args), results(joined, Frozen(model, given), *args))
    assert captures.count == 1


# --- when it is captured anew ---


def another_token(prompt: Tensor) -> Tensor:
    prompt = prompt.clone()
    prompt[0, 3] = (prompt[0, 3] + 1) % VOCABULARY
    return prompt


def one_token_more(prompt: Tensor) -> Tensor:
    return torch.cat([prompt, prompt[:, :1]], 1)


@pytest.mark.parametrize("changed", [another_token, one_token_more])
def test_another_prompt_is_captured(shared: Shared, captures: Captures, changed: Callable) -> None:
    model = Tiny()
    results(shared, model, *inputs(3))
    change(model)
    args = (changed(inputs(3)[0]), *inputs(3)[1:])
    assert_close(results(shared, model, *args), expected(model, model, args))
    results(shared, model, *inputs(3))
    assert captures.count == 3
    assert captures.alive() == 1
    assert not shared.drifts


def test_another_model_is_captured(shared: Shared, captures: Captures) -> None:
    model, other = Tiny(), Tiny()
    change(other)
    for one in (model, other):
        assert_close(results(shared, one, *inputs(4)), expected(one, one, inputs(4)))
    assert captures.count == 2


def test_a_prompt_overwritten_in_place_is_captured(shared: Shared, captures: Captures) -> None:
    model, args = Tiny(), inputs(4)
    results(shared, model, *args)
    args[0].copy_(another_token(args[0]))
    for _ in range(2):
        assert_close(results(shared, model, *args), expected(model, model, args))
    assert captures.count == 2


# --- steps that fail, that wait ---


class Broken(Exception):
    """Raised by a kernel."""


@pytest.mark.parametrize("steps_before", [0, 1, 3], ids=["capture", "reuse", "drift"])
@pytest.mark.parametrize("when", ["forward", "backward"])
def test_a_step_that_fails_leaves_nothing_behind(
    shared: Shared, captures: Captures, monkeypatch: pytest.MonkeyPatch, when: str, steps_before: int
) -> None:
    model = Tiny()
    for _ in range(steps_before):
        results(shared, model, *inputs(5))
    change(model)
    args = inputs(5, group=4)  # more than keep their graphs from the forward on

    def fail(*args: Any, **kwargs: Any) -> Tensor:
        raise Broken

    loss = shared(model, *args) if when == "backward" else None
    with pytest.raises(Broken), monkeypatch.context() as patch:
        patch.setattr(mixing.attention, "attend", fail)
        shared(model, *args) if loss is None else loss.backward()
    del loss
    gc.collect()
    assert not captures.alive()
    assert_close(results(shared, model, *args), expected(model, model, args))


def test_backwards_that_wait_keep_the_state_they_read(shared: Shared, captures: Captures) -> None:
    model = Tiny()
    both = [inputs(6), inputs(7)]
    found = results(lambda model: sum(shared(model, *args) for args in both), model)
    alone = [expected(model, model, args) for args in both]
    assert_close(found, [None if one is None else one + other for one, other in zip(*alone, strict=True)])
    assert captures.alive() == 1


# --- what is said ---


def test_reuses_and_drifts_are_logged(shared: Shared, lines: list[logging.LogRecord]) -> None:
    model = Tiny()
    for number in range(7):
        results(shared, model, *inputs(8))
        change(model, number, size=0.001 if number < 3 else 1.0)
    found = [(line.levelname, line.getMessage().split(":")[0]) for line in lines]
    reused = ("INFO", "prompt of 8 tokens reused, not captured anew")
    drift = "drift of a prompt captured 3 steps ago"
    assert found == [reused, reused, ("INFO", drift), reused, reused, ("WARNING", drift)]
    assert "step 1 of 2" in lines[0].getMessage()
    assert "the loss differs by" in lines[2].getMessage()
    assert "log-probabilities by" in lines[2].getMessage()


def test_a_drift_without_a_loss_and_with_equal_infinities() -> None:
    drifts: list[Drift] = []
    options = Options(on_drift=drifts.append)
    new, old = torch.tensor([-1.0, float("-inf")]), torch.tensor([-1.5, float("-inf")])
    outputs = reuse.outputs_and_drift(lambda *results: results, [[new]], [reuse.Stale([old], 2)], options)
    assert outputs[0] is new
    assert drifts == [Drift(2, None, 0.25)]
    assert "loss" not in str(drifts[0])


def test_the_drift_is_that_of_what_the_loss_reads() -> None:
    drifts: list[Drift] = []
    options = Options(on_drift=drifts.append)
    new, old = torch.tensor([[-1.0, 0.0], [0.0, 0.0]]), torch.tensor([[-1.5, 0.0], [0.0, 0.0]])
    for read in (torch.tensor([[True, False], [False, False]]), torch.zeros(2, 2, dtype=torch.bool)):
        reuse.outputs_and_drift(lambda *results: results, [[new]], [reuse.Stale([old], 2, [read])], options)
    assert drifts == [Drift(2, None, 0.5), Drift(2, None, 0.0)]


def test_the_drift_leaves_the_random_numbers_of_the_step() -> None:
    drawn = []
    for stale in (None, reuse.Stale([torch.zeros(3)], 1)):
        torch.manual_seed(0)
        noisy = reuse.outputs_and_drift(lambda r: r.sum() + torch.rand(()), [[torch.zeros(3)]], [stale], Options())
        drawn.append((noisy, torch.rand(())))
    assert drawn[0] == drawn[1]


def test_the_published_drifts_of_one_and_two_steps_are_not_large() -> None:
    assert 0.025 < reuse.LARGE_DRIFT < 3.14


# --- several programs ---


def two_passes(model: nn.Module, other: nn.Module, prompt: Tensor, responses: Tensor, weights: Tensor) -> Tensor:
    ids = torch.cat([prompt.expand(responses.shape[0], -1), responses], 1)
    with torch.no_grad():
        reference = selected_logp(other(ids)[:, prompt.shape[1] - 1 : -1], responses)
    logp = selected_logp(model(ids)[:, prompt.shape[1] - 1 : -1], responses)
    return ((logp - reference).exp() * weights).sum()


def test_two_branches_have_a_cache_each(captures: Captures) -> None:
    model, other, drifts = Tiny(), Tiny(30), []
    found = compiled(two_passes, k=1, on_drift=drifts.append)
    for number in range(3):
        results(found, model, other, *inputs(9, number))
    assert captures.count == 4
    assert captures.alive() == 2
    assert drifts == [Drift(2, 0.0, 0.0)]


def test_calls_under_no_grad_have_a_cache_of_their_own_which_goes_with_the_step(
    shared: Shared, captures: Captures
) -> None:
    model = Tiny()
    args = inputs(10)
    with torch.no_grad():
        assert torch.equal(shared(model, *args), shared(model, *args))
        assert captures.count == 1
        old = copy.deepcopy(model)
        change(model)
        torch.testing.assert_close(shared(model, *args), step(reference(model, old, args), *args), rtol=1e-12, atol=0)
        torch.testing.assert_close(shared(model, *args), step(model, *args), rtol=1e-12, atol=0)
    assert captures.count == 2
    assert captures.alive() == 1
    assert shared.drifts[0].loss > 0 and shared.drifts[0].log_prob > 0
    torch._dynamo.reset()
    gc.collect()
    assert all(store() is None for store in captures.stores)


def test_explain_says_that_the_prompt_is_reused() -> None:
    options = {"prompt_grad": "none", "reuse_prompt_for": 2}
    first = str(longstraw.explain(step, Tiny(), *inputs(), options=options)).splitlines()[0]
    assert first.endswith("prompt_grad = none, prompt reused for 2 steps")


def test_a_drift_whose_hook_fails_leaves_no_prompt(captures: Captures) -> None:
    def refuse(drift: longstraw.Drift) -> None:
        raise Broken

    model, function = Tiny(), compiled(step, 1, on_drift=refuse)
    for _ in range(2):
        results(function, model, *inputs(5))
    with pytest.raises(Broken):
        results(function, model, *inputs(5))
    gc.collect()
    assert not captures.alive()
    before = captures.count
    results(function, model, *inputs(5))
    assert captures.count == before + 1
