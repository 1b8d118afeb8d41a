"""Each pass on the smallest step that reaches it: what it matches, what it refuses, and the same numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, library, nn

import longstraw.ops
from longstraw import errors
from longstraw.arch.rules import op_name
from longstraw.render import describe
from tests.small import HEADS, KEY_HEADS, VOCABULARY, WIDTH, Tiny, assert_same, gradients, inputs, records, step

aten = torch.ops.aten


def ops_of(module: torch.fx.GraphModule) -> list[str]:
    return [op_name(node).rsplit(".", 1)[-1] for node in module.graph.nodes if node.op == "call_function"]


# --- trace ------------------------------------------------------------------------------------------------------------


def test_trace_keeps_attention_and_symbolic_sizes() -> None:
    step_ = records()["trace"]
    assert "scaled_dot_product_attention" in ops_of(step_.module)
    table = next(n for n in step_.module.graph.nodes if n.target is aten.embedding.default)
    assert all(isinstance(size, torch.SymInt) for size in table.meta["val"].shape[:2])
    assert "table" in table.meta["stack_trace"]


def test_trace_gives_equal_lengths_their_own_symbols() -> None:
    sizes = records(step, Tiny(), *inputs(prompt=6, response=6, group=6))["find_branches"].sizes
    assert len(sizes.tokens_expr.free_symbols) == 2
    assert not sizes.rows_expr.free_symbols & sizes.tokens_expr.free_symbols


def test_trace_inlines_checkpointed_layers() -> None:
    class Checkpointed(Tiny):
        def attend(self, x: Tensor) -> Tensor:
            return torch.utils.checkpoint.checkpoint(super().attend, x, use_reentrant=False)

    assert_same(Checkpointed(), *inputs())


# --- normalise --------------------------------------------------------------------------------------------------------


def explicit(scores_of: object = None) -> type[Tiny]:
    class Explicit(Tiny):
        def attend(self, x: Tensor) -> Tensor:
            q = self.heads(self.query(x), HEADS)
            k, v = (
                self.heads(f(x), KEY_HEADS).repeat_interleave(HEADS // KEY_HEADS, 1) for f in (self.key, self.value)
            )
            scores = q @ k.transpose(-1, -2) * 0.3
            if scores_of is not None:
                scores = scores_of(scores)
            seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
            return torch.softmax(scores.masked_fill(~seen, float("-inf")), -1) @ v

    return Explicit


@pytest.mark.parametrize(
    "scores_of",
    [None, lambda s: s / 2.0, lambda s: 3 * torch.tanh(s / 3), lambda s: s - s.amax(-1, keepdim=True)],
    ids=["plain", "divided", "soft capped", "shifted by its maximum"],
)
def test_normalise_recognises_explicit_attention(scores_of: object) -> None:
    model = explicit(scores_of)()
    module = records(step, model, *inputs())["normalise"].module
    assert sum(node.target is longstraw.ops.attention for node in module.graph.nodes) == 1
    assert "softmax" not in ops_of(module)
    assert_same(model, *inputs())


@pytest.mark.parametrize(
    ("heads_last", "scores", "mixture"),
    [
        (False, "bhqd,bhkd->bhqk", "bhqk,bhkd->bhqd"),
        (False, "...qd, ...kd -> ...qk", "...qk, ...kd -> ...qd"),
        (True, "bqhd,bkhd->bhqk", "bhqk,bkhd->bhqd"),
        (True, "bkhd,bqhd->bhqk", "bkhd,bhqk->bhqd"),
    ],
)
def test_normalise_recognises_attention_by_einsum(heads_last: bool, scores: str, mixture: str) -> None:
    class ByEinsum(Tiny):
        def attend(self, x: Tensor) -> Tensor:
            parts = [self.heads(f(x), KEY_HEADS) for f in (self.key, self.value, self.key)]
            one, v, other = (part.transpose(1, 2) if heads_last else part for part in parts)
            seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
            weights = (torch.einsum(scores, one, other) / 2).masked_fill(~seen, float("-inf")).softmax(-1)
            operands = (v, weights) if mixture.startswith("bkhd") else (weights, v)
            return torch.einsum(mixture, *operands).repeat_interleave(2, 1)

    module = records(step, ByEinsum(), *inputs())["normalise"].module
    assert sum(node.target is longstraw.ops.attention for node in module.graph.nodes) == 1
    assert_same(ByEinsum(), *inputs())


@pytest.mark.parametrize(
    "masked",
    [
        lambda scores, later: torch.where(later, float("-inf"), scores),
        lambda scores, later: torch.where(later, torch.full_like(scores, -1e9), scores),
        lambda scores, later: torch.where(~later, scores, torch.finfo(scores.dtype).min),
        lambda scores, later: scores + torch.where(later, float("-inf"), 0.0),
        lambda scores, later: scores + later.double() * -1e9,
        lambda scores, later: scores + (1.0 - (~later).to(scores.dtype)) * -1e4,
        lambda scores, later: scores - 1e9 * later,
        lambda scores, later: scores.sub(torch.zeros(later.shape, dtype=scores.dtype).masked_fill(later, 1e18)),
    ],
)
def test_normalise_recognises_masks_of_scores(masked: Callable[[Tensor, Tensor], Tensor]) -> None:
    class ByWhere(Tiny):
        def attend(self, x: Tensor) -> Tensor:
            q, v = (self.heads(f(x), KEY_HEADS) for f in (self.key, self.value))
            later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
            return (masked(q @ q.mT / 2, later).softmax(-1) @ v).repeat_interleave(2, 1)

    assert_same(ByWhere(), *inputs())


def test_tables_of_positions_may_be_cut_to_the_length_of_the_row() -> None:
    class Rotary(Tiny):
        def __init__(self) -> None:
            super().__init__()
            angles = torch.outer(torch.arange(64.0), torch.linspace(0.1, 1, WIDTH)).double()
            self.register_buffer("cos", angles.cos())
            self.register_buffer("sin", angles.sin()[None, :, None])

        def heads(self, x: Tensor, count: int) -> Tensor:
            x = x * self.cos[: x.shape[1], : x.shape[-1]]
            heads = x.view(*x.shape[:2], count, -1)
            return (heads + heads.flip(-1) * self.sin[:, : x.shape[1], :, : heads.shape[-1]]).transpose(1, 2)

    assert_same(Rotary(), *inputs(), span_tokens=4)


def test_composite_ops_without_a_rule_are_traced_as_what_they_are_made_of() -> None:
    class Composites(Tiny):
        def hidden(self, ids: Tensor) -> Tensor:
            x = super().hidden(ids)
            likeness = F.cosine_similarity(x, x.roll(1, -1), dim=-1)[..., None]
            return x * likeness + torch.tensordot(x, self.out.weight, 1) + torch.tile(x[..., : WIDTH // 2], (1, 1, 2))

    ops = ops_of(records(step, Composites(), *inputs())["trace"].module)
    assert not {"cosine_similarity", "tensordot", "tile"} & set(ops)
    assert_same(Composites(), *inputs())


def test_normalise_keeps_a_bias_that_grows_with_distance() -> None:
    class Biased(Tiny):
        def attend(self, x: Tensor) -> Tensor:
            q, k, v = (self.heads(f(x), KEY_HEADS) for f in (self.key, self.key, self.value))
            at = torch.arange(x.shape[1], dtype=x.dtype)
            bias = -0.2 * (at[:, None] - at[None, :]).abs()
            seen = at[None, :] <= at[:, None]
            weights = torch.softmax((q @ k.transpose(-1, -2) + bias).masked_fill(~seen, -1e30), -1)
            return (weights @ v).repeat_interleave(2, 1)

    assert_same(Biased(), *inputs())


def test_normalise_makes_in_place_ops_functional() -> None:
    class InPlace(Tiny):
        def attend(self, x: Tensor) -> Tensor:
            y = super().attend(x).clone()
            y[..., 1:3] = y[..., :2] * 2
            y.mul_(0.5)
            return y

    module = records(step, InPlace(), *inputs())["normalise"].module
    assert not any(getattr(n.target, "_schema", None) and n.target._schema.is_mutable for n in module.graph.nodes)
    assert_same(InPlace(), *inputs())


def test_normalise_turns_no_grad_into_detach() -> None:
    class Frozen(Tiny):
        def hidden(self, ids: Tensor) -> Tensor:
            with torch.no_grad():
                scale = self.table(ids).mean(-1, keepdim=True)
            return super().hidden(ids) * scale

    assert "detach" in ops_of(records(step, Frozen(), *inputs())["normalise"].module)
    assert_same(Frozen(), *inputs())


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_normalise_decomposes_cross_entropy_with_its_reduction(reduction: str) -> None:
    def supervised(model: nn.Module, prompt: Tensor, responses: Tensor, weights: Tensor) -> Tensor:
        ids = torch.cat([prompt.expand(responses.shape[0], -1), responses], 1)
        logits = model(ids)[:, prompt.shape[1] - 1 : -1]
        labels = responses.masked_fill(weights > 1, -100)
        return F.cross_entropy(logits.reshape(-1, VOCABULARY), labels.reshape(-1), reduction=reduction)

    assert_same(Tiny(), *inputs(), function=supervised)


# --- find_branches ----------------------------------------------------------------------------------------------------


def test_find_branches_separates_two_models() -> None:
    reference = Tiny()

    def with_reference(model: nn.Module, prompt: Tensor, responses: Tensor, weights: Tensor) -> Tensor:
        with torch.no_grad():
            other = step(reference, prompt, responses, weights)
        return step(model, prompt, responses, weights) * (1 + other)

    assert len(records(with_reference, Tiny(), *inputs())["find_branches"].branches) == 2
    assert_same(Tiny(), *inputs(), function=with_reference)


def test_find_branches_calls_ids_light_and_logits_hidden() -> None:
    kinds = records()["find_branches"].kinds
    by_op = {op_name(node): kind for node, kind in kinds.items()}
    assert by_op["aten.cat"] == "light"
    assert by_op["aten.log_softmax"] == "region"
    assert by_op["aten.gather"] == "tail"


# --- find_token_dim ---------------------------------------------------------------------------------------------------


def test_find_token_dim_follows_views_into_heads() -> None:
    located = records()["find_token_dim"]
    attention = next(n for n in located.module.graph.nodes if n.target is longstraw.ops.attention)
    assert describe(located.layouts[attention]).startswith(f"rows, {HEADS}, tokens[0:")


def test_find_token_dim_lets_a_user_add_a_rule() -> None:
    from longstraw import Rule

    @library.custom_op("longstraw_tests::cube", mutates_args=())
    def cube(x: Tensor) -> Tensor:
        return x**3

    cube.register_fake(torch.empty_like)
    cube.register_autograd(
        lambda ctx, grad: 3 * ctx.saved_tensors[0] ** 2 * grad,
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )

    class Cubed(Tiny):
        def hidden(self, ids: Tensor) -> Tensor:
            return cube(super().hidden(ids))

    with pytest.raises(Exception, match="no rule says what it does along the token dim"):
        records(step, Cubed(), *inputs())
    rule = Rule(torch.ops.longstraw_tests.cube.default, lambda reader, node: reader.operand(node, node.args[0]))
    assert_same(Cubed(), *inputs(), rules=(rule,))


@pytest.mark.parametrize(
    ("mix", "error"),
    [
        (lambda x: torch.roll(x, 1, 1), errors.MixesTokens),
        (lambda x: x.cumprod(1), errors.MixesTokens),
        (lambda x: x - x.mean(1, keepdim=True), errors.MixesTokens),
        (lambda x: x - x.mean(0, keepdim=True), errors.MixesRows),
        (lambda x: x + F.pad(x, (0, 0, -1, 1)), errors.MixesTokens),
        (lambda x: x[:, torch.arange(x.shape[1]).flip(0)], errors.UnsupportedOp),
        (lambda x: x.sort(1).values, errors.MixesTokens),
    ],
    ids=["roll", "cumprod", "centred over tokens", "centred over rows", "later", "reversed", "sorted"],
)
def test_find_token_dim_refuses_what_mixes(mix: object, error: type[Exception]) -> None:
    class Mixed(Tiny):
        def hidden(self, ids: Tensor) -> Tensor:
            return mix(super().hidden(ids))

    with pytest.raises(error) as caught:
        records(step, Mixed(), *inputs())
    assert "test_passes.py" in str(caught.value)


# --- partition --------------------------------------------------------------------------------------------------------


def test_partition_cuts_at_the_log_probabilities() -> None:
    partitioned = records()["partition"]
    (segment,) = partitioned.segments
    assert [op_name(node) for node in segment.results] == ["aten.gather"]
    assert "gather" not in ops_of(partitioned.objective)
    (head,) = segment.heads
    assert ops_of(head.graph.module)[:1] == ["linear"]


def test_partition_gives_each_window_its_head() -> None:
    def two_windows(model: nn.Module, prompt: Tensor, responses: Tensor, weights: Tensor) -> Tensor:
        ids = torch.cat([prompt.expand(responses.shape[0], -1), responses], 1)
        logp = torch.log_softmax(model(ids), -1)
        entropy = -(logp.exp() * logp).sum(-1)
        chosen = logp[:, prompt.shape[1] - 1 : -1].gather(-1, responses[..., None]).squeeze(-1)
        return (chosen * weights).sum() + entropy.square().mean()

    assert len(records(two_windows, Tiny(), *inputs())["partition"].segments[0].heads) == 2
    assert_same(Tiny(), *inputs(), function=two_windows)


@pytest.mark.parametrize(
    "cut",
    [
        lambda logp, responses: logp[:, -responses.shape[1] :],
        lambda logp, responses: logp[:, logp.shape[1] - responses.shape[1] :],
        lambda logp, responses: logp.narrow(1, logp.shape[1] - responses.shape[1], responses.shape[1]),
        lambda logp, responses: logp[:, -3:],
        lambda logp, responses: logp[1:, -3:],
    ],
    ids=["from the end", "from the start", "narrow", "a number", "rows, too"],
)
def test_partition_cuts_results_to_a_window_that_is_taken_last(cut: object) -> None:
    def cut_last(model: nn.Module, prompt: Tensor, responses: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        ids = torch.cat([prompt.expand(responses.shape[0], -1), responses], 1)
        logp = torch.log_softmax(model(ids)[:, :-1], -1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        logp = cut(logp, responses)
        return (logp.sin() * weights[: logp.shape[0], -logp.shape[1] :]).sum(), logp

    def loss(*args: object) -> Tensor:
        return cut_last(*args)[0]

    model, args = Tiny(), inputs()
    _, expected = cut_last(model, *args)
    _, found = torch.compile(cut_last, backend="longstraw")(model, *args)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    assert_same(model, *args, function=loss)


def test_partition_cuts_results_to_as_many_tokens_as_an_argument_says() -> None:
    def last(model: nn.Module, ids: Tensor, keep: int) -> Tensor:
        logp = torch.log_softmax(model(ids)[:, :-1], -1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        return logp[:, -keep:]

    prompt, responses, _ = inputs()
    ids = torch.cat([prompt.expand(responses.shape[0], -1), responses], 1)
    model, compiled = Tiny(), torch.compile(last, backend="longstraw")
    for keep in (4, 3):
        torch.testing.assert_close(compiled(model, ids, keep), last(model, ids, keep), rtol=1e-12, atol=0)


def test_partition_leaves_a_penalty_on_weights_to_the_objective() -> None:
    def penalised(model: nn.Module, *args: Tensor) -> Tensor:
        return step(model, *args) + 0.1 * sum(p.square().sum() for p in model.parameters())

    assert_same(Tiny(), *inputs(), function=penalised)


# --- insert_state -----------------------------------------------------------------------------------------------------


def test_insert_state_keeps_keys_and_values_before_head_repetition() -> None:
    (branch,) = records()["insert_state"].branches
    assert [(slot.heads, slot.width) for slot in branch.slots] == [(KEY_HEADS, WIDTH // HEADS)] * 2


@pytest.mark.parametrize(
    "repeat",
    [
        lambda t: t[:, :, None].expand(-1, -1, 2, -1, -1).reshape(t.shape[0], HEADS, t.shape[2], -1),
        lambda t: t.repeat_interleave(2, 1),
        lambda t: torch.stack([t, t], 2).flatten(1, 2),
    ],
    ids=["expand and reshape", "repeat_interleave", "stack"],
)
def test_insert_state_stays_exact_for_every_spelling_of_repetition(repeat: object) -> None:
    class Repeated(Tiny):
        def attend(self, x: Tensor) -> Tensor:
            q, k, v = self.heads(self.query(x), HEADS), *(self.heads(f(x), KEY_HEADS) for f in (self.key, self.value))
            return F.scaled_dot_product_attention(q, repeat(k), repeat(v), is_causal=True)

    assert_same(Repeated(), *inputs())


def test_insert_state_shares_a_slot_between_attentions_that_read_the_same_keys() -> None:
    class Shared(Tiny):
        def attend(self, x: Tensor) -> Tensor:
            q, k, v = (self.heads(f(x), KEY_HEADS) for f in (self.key, self.key, self.value))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return F.scaled_dot_product_attention(y, k, v, is_causal=True).repeat_interleave(2, 1)

    (branch,) = records(step, Shared(), *inputs())["insert_state"].branches
    assert len(branch.sites) == 2 and len(branch.slots) == 2
    assert_same(Shared(), *inputs())


def test_insert_state_captures_without_a_head() -> None:
    (branch,) = records()["insert_state"].branches
    assert "attend" not in ops_of(branch.capture), "the last attention isn't needed for state"
    assert ops_of(branch.score).count("attend") == 1


# --- lower ------------------------------------------------------------------------------------------------------------


def test_lower_tiles_a_wide_feed_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    class Deep(Tiny):
        def hidden(self, ids: Tensor) -> Tensor:
            x = super().hidden(ids)
            x = x + self.out(self.attend(x).transpose(1, 2).reshape(x.shape))
            return x + self.down(torch.tanh(self.up(x)))

    model = Deep(inner=200)
    branch = records(step, model, *inputs())["lower"].step.branches[0]
    assert "tiled" in ops_of(branch.score)
    monkeypatch.setattr(longstraw.ops, "TILE_BYTES", 3 * 200 * 8 * 2)
    assert_same(model, *inputs(), span_tokens=7)


def test_tiled_equals_the_function_on_all_tokens() -> None:
    weight = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)
    x = torch.randn(2, 11, 5, dtype=torch.float64, requires_grad=True)

    def function(rows: int, tokens: int, x: Tensor, weight: Tensor) -> Tensor:
        assert x.shape[1] == tokens
        return torch.sin(x @ weight)

    grad = torch.randn(2, 11, 7, dtype=torch.float64)
    expected = torch.autograd.grad(function(2, 11, x, weight), (x, weight), grad)
    whole = longstraw.ops.tiled(function, longstraw.ops.TILE_BYTES // 8, 2, 11, (1, None), 1, x, weight)
    found = torch.autograd.grad(whole, (x, weight), grad)
    torch.testing.assert_close(whole, function(2, 11, x, weight))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("inner", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_inner_backend_runs_the_segments(inner: str) -> None:
    assert_same(Tiny(), *inputs(), inner_backend=inner)


# --- split_at_backward ------------------------------------------------------------------------------------------------


def test_split_at_backward_moves_metrics_before_it_and_keeps_what_needs_gradients_after() -> None:
    def own_backward(model: nn.Module, *args: Tensor) -> tuple[Tensor, Tensor]:
        loss = step(model, *args)
        loss.backward()
        return loss.detach() * 2, model.head.weight.grad.norm()

    model = Tiny()
    model.zero_grad()
    expected = own_backward(model, *inputs())
    grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    found = torch.compile(own_backward, backend="longstraw")(model, *inputs())
    torch.testing.assert_close(found, expected)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, grads[name], rtol=1e-10, atol=1e-11)


def test_a_second_call_is_bit_equal() -> None:
    model = Tiny()
    compiled = torch.compile(step, backend="longstraw", options={"span_tokens": 3})
    first = gradients(compiled, model, *inputs())
    kept = {name: g.clone() for name, g in first[1].items()}
    second = gradients(compiled, model, *inputs())
    assert torch.equal(first[0], second[0])
    assert all(torch.equal(kept[name], g) for name, g in second[1].items())
