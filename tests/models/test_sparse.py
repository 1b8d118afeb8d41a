"""Sparse attention with shared selections, latents and experts: the whole step equals eager, and choices are frozen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import longstraw
from longstraw.errors import LongstrawError
from longstraw.runtime import mixing, selection
from tests.equality import assert_equal, compare
from tests.models import zoo
from tests.small import Tiny, assert_same, inputs, records, step
from tests.steps import STEPS
from tests.sweeps import sweep

OPTIONS = {"page_tokens": 4, "grad_dtype": torch.float64}
SHARED = {"indexer_types": ["full", "shared"]}
FORMS = {"gathered": 1e-9, "masked": 1e9, "by count": mixing.GATHER_COST}
"""How attention reads what was selected, by what a gathered key is said to cost."""


def build(name: str = "glm_moe_dsa", **changed: Any) -> nn.Module:
    return zoo.build(name, **{**(SHARED if name == "glm_moe_dsa" else {}), **changed})


def gradients(function: Callable[..., Tensor], model: nn.Module, given: dict[str, Any]) -> dict[str, Tensor]:
    model.zero_grad()
    loss = function(model, **given)
    loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **found}


def assert_every_form_equals_eager(
    monkeypatch: pytest.MonkeyPatch, model: nn.Module, kind: str, *lengths: tuple[int, int], span_tokens: int = 7
) -> None:
    """One compilation, every form, every length of prompt and response."""
    torch._dynamo.reset()
    run = torch.compile(STEPS[kind].function, backend="longstraw", options={**OPTIONS, "span_tokens": span_tokens})
    for prompt, response in lengths:
        given = STEPS[kind].inputs(model, prompt=prompt, response=response)
        expected = gradients(STEPS[kind].function, model, given)
        for name, cost in FORMS.items():
            monkeypatch.setattr(mixing, "GATHER_COST", cost)
            found = gradients(run, model, given)
            assert set(found) == set(expected)
            floor = 1e-5 * max(float(x.norm()) for x in expected.values())
            for key, value in expected.items():
                error = float((found[key] - value).norm()) / max(float(value.norm()), floor)
                assert error < 1e-10, (name, prompt, response, key)


@pytest.mark.parametrize("span_tokens", sweep([1, 7, 64], always=[7]))
def test_shared_selections_equal_eager(monkeypatch: pytest.MonkeyPatch, span_tokens: int) -> None:
    """Prompts shorter than top-k, in spans that top-k ends in, and far longer."""
    lengths = ((2, 2), (3, 5), (19, 5), (41, 3))
    assert_every_form_equals_eager(monkeypatch, build(index_topk=4), "grpo", *lengths, span_tokens=span_tokens)


@pytest.mark.zoo
@pytest.mark.parametrize("top_k", [1, 9, 23, 24, 64])
@pytest.mark.parametrize("span_tokens", [1, 7, 64])
def test_every_top_k_equals_eager(monkeypatch: pytest.MonkeyPatch, top_k: int, span_tokens: int) -> None:
    model = build(index_topk=top_k, layers=4, indexer_types=["full", "shared", "full", "shared"])
    assert_every_form_equals_eager(monkeypatch, model, "grpo", (19, 5), (41, 3), span_tokens=span_tokens)


@pytest.mark.parametrize("name", ["deepseek_v32", pytest.param("axk2", marks=pytest.mark.zoo)])
def test_models_with_an_indexer_on_every_layer_equal_eager(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    assert_every_form_equals_eager(monkeypatch, build(name, index_topk=5), "grpo", (19, 5))


KINDS_OF_ROWS = [
    "padded_batch_left",
    *(
        pytest.param(kind, marks=pytest.mark.zoo)
        for kind in ("padded_batch", "padded_batch_unequal_prompts", "rows_two_prompts", "inputs_embeds")
    ),
]


@pytest.mark.parametrize("kind", KINDS_OF_ROWS)
def test_padding_and_prompts_of_their_own(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    given = STEPS[kind]
    assert_every_form_equals_eager(monkeypatch, build(index_topk=4), kind, (given.prompt, given.response))


@pytest.mark.parametrize("name", ["glm_moe_dsa", "hy_v4"])
def test_explicit_attention_under_a_selection(name: str) -> None:
    """The second one has scores that tie at zero, and a mask with a finite number for keys that are not seen."""
    model = build(name, index_topk=4, attention="eager")
    assert_equal(compare(STEPS["grpo"], model, STEPS["grpo"].inputs(model), options={**OPTIONS, "span_tokens": 7}))


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3", "glm_moe_dsa"])
def test_state_is_latents_and_keys_of_the_indexer(name: str) -> None:
    model = build(name)
    config = model.config
    found = longstraw.explain(STEPS["grpo"].function, model, **STEPS["grpo"].inputs(model)).records[0]
    branch = found["insert_state"].branches[0]
    latents = [slot for slot in branch.slots if slot.learns]
    assert len(latents) == config.num_hidden_layers
    assert {(slot.heads, slot.width) for slot in latents} == {(1, config.kv_lora_rank + config.qk_rope_head_dim)}
    full = list(getattr(config, "indexer_types", [])).count("full")
    keys = [slot for slot in branch.slots if not slot.learns]
    assert [(slot.heads, slot.width) for slot in keys] == [(1, getattr(config, "index_head_dim", 0))] * full
    assert len(branch.choosers) == full


def test_layers_without_an_indexer_read_the_choice_of_the_last_one() -> None:
    model = build(index_topk=4, layers=4, indexer_types=["full", "shared", "full", "shared"])
    found = longstraw.explain(STEPS["grpo"].function, model, **STEPS["grpo"].inputs(model)).records[0]
    assert [site.chooser for site in found["insert_state"].branches[0].sites] == [0, 0, 1, 1]


def nearly_tie(model: nn.Module) -> None:
    """Make all keys of a model's indexers alike but for their last bits, wherever they stand."""
    for indexer in (module for module in model.modules() if hasattr(module, "wq_b")):
        turned = torch.arange(indexer.wq_b.out_features) % indexer.head_dim < indexer.qk_rope_head_dim
        with torch.no_grad():
            indexer.wq_b.weight[turned] = 0
            indexer.k_norm.weight.mul_(1e-6)
            indexer.k_norm.bias.fill_(1)


def test_replay_and_unwind_choose_as_the_forward_did(monkeypatch: pytest.MonkeyPatch) -> None:
    model = zoo.build("glm_moe_dsa", dtype=torch.float32, index_topk=4, **SHARED)
    nearly_tie(model)
    made: dict[Any, Tensor] = {}
    again, gaps = 0, []
    choose = selection.choose

    def watched(candidates: selection.Candidates, **sizes: int) -> Tensor:
        nonlocal again
        found = choose(candidates, **sizes)
        chooser, queries, start = candidates.chooser, candidates.queries, candidates.start
        if start < chooser.k:
            return found
        seen = torch.cat([p.values[0].expand(queries[0].shape[0], -1, -1, -1) for p in candidates.pieces], 2)
        scores = chooser.score(*queries, seen[:, :, : start + 1], *candidates.others)
        best = scores.topk(chooser.k + 1, -1).values
        gaps.append(float(((best[..., -2] - best[..., -1]) / best[..., -2].abs()).min()))
        # The queries' tokens tell the rows.
        key = (start, queries[0].shape, float(queries[0].double().sum()))
        if key in made:
            again += 1
            assert torch.equal(found, made[key])
        made[key] = found
        return found

    monkeypatch.setattr(selection, "choose", watched)
    torch._dynamo.reset()
    run = torch.compile(STEPS["grpo"].function, backend="longstraw", options={"span_tokens": 5, "page_tokens": 4})
    given = STEPS["grpo"].inputs(model, prompt=19, response=5, dtype=torch.float32)
    run(model, **given).backward()
    assert again >= 4 and 0 < min(gap for gap in gaps if gap > 0) < 1e-6


def chosen(places: Tensor) -> Tensor:
    """The mask of a selection, `[rows, tokens, tokens]`, for 17 tokens."""
    return torch.zeros(*places.shape[:2], places.shape[1], dtype=torch.bool).scatter(-1, places, True)


def below(mask: Tensor, value: float = -1e30) -> Tensor:
    """A bool mask as numbers that are added."""
    return torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, value)


def window(mask: Tensor, width: int) -> Tensor:
    return mask & ~mask.tril(-width)


class Written(Tiny):
    """Scores and masks as a test writes them: `scores(products, causal)`, `mask(places, causal)`."""

    def __init__(
        self,
        scores: Callable[[Tensor, Tensor], Tensor] = lambda s, c: s.masked_fill(~c, float("-inf")),
        mask: Callable[[Tensor, Tensor], Tensor] = lambda p, c: (chosen(p) & c)[:, None],
        count: Callable[[int], Any] = lambda size: min(3, size),
        products: Callable[[Tensor, Tensor], Tensor] = lambda q, k: q.mean(2) @ k.mT,
    ) -> None:
        super().__init__()
        self.scores, self.mask, self.count, self.products = scores, mask, count, products
        self.index_query, self.index_key = nn.Linear(16, 8).double(), nn.Linear(16, 4).double()

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(self.query(x), 4), *(self.heads(f(x), 2) for f in (self.key, self.value))
        k, v = (t.repeat_interleave(2, 1) for t in (k, v))
        size = x.shape[1]
        causal = torch.ones(size, size, dtype=torch.bool).tril()
        with torch.no_grad():
            products = self.products(self.index_query(x).unflatten(-1, (2, 4)), self.index_key(x))
            places = self.scores(products, causal).topk(self.count(size), -1).indices
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=self.mask(places, causal))


def heads_first(q: Tensor, k: Tensor) -> Tensor:
    return torch.relu(q.transpose(1, 2) @ k.mT[:, None]).sum(1)


def left_out(places: Tensor) -> Tensor:
    """The mask of what was not selected."""
    return torch.ones(*places.shape[:2], places.shape[1], dtype=torch.bool).scatter(-1, places, False)


EXACT: dict[str, dict[str, Any]] = {
    "products summed over heads": {"products": heads_first},
    "products of one head": {"products": lambda q, k: (q[:, :, 0] @ k.transpose(1, 2)) / 2},
    "false scattered": {"mask": lambda p, c: (c & ~left_out(p))[:, None]},
    "a mask without rows on scores and attention": {},
    "a mask without rows chosen by where": {"scores": lambda s, c: torch.where(c, s, float("-inf"))},
    "masks of rows": {"mask": lambda p, c: (chosen(p) & c.expand(p.shape[0], -1, -1))[:, None]},
    "numbers that are added": {"mask": lambda p, c: (below(chosen(p)) + below(c))[:, None]},
    "two products with one key": {
        "products": lambda q, k: q[:, :, 0] @ k.mT + torch.relu(q[:, :, 1] @ k.transpose(1, 2))
    },
    "scores of keys with one another": {"products": lambda q, k: k @ k.mT},
    "a bias of each key": {"products": lambda q, k: q.mean(2) @ k.mT + k[..., :1].mT},
    "scores that are not numbers": {"products": lambda q, k: (q.mean(2) @ k.mT).sqrt()},
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "half of the keys": ({"count": lambda size: min(12, size // 2)}, "how many keys it takes depends on their number"),
    "all but a few keys": ({"count": lambda size: min(8, size - 12)}, "how many keys it takes depends on their number"),
    "scores taken from a mask": (
        {"scores": lambda s, c: torch.add(below(c).expand_as(s), s, alpha=-1)},
        "expand_as is not known to keep pairs",
    ),
    "a part of a mask": ({"scores": lambda s, c: torch.add(s, below(c, -10.0), alpha=0.3)}, "takes a size that varies"),
    "a part of both masks": (
        {"mask": lambda p, c: torch.add(below(chosen(p)), below(c) - (~c).cumsum(-1), alpha=0.5)[:, None]},
        "keys that were selected may only say what an attention sees",
    ),
    "nothing that was selected is seen": (
        {"mask": lambda p, c: (below(chosen(p)) + below(window(c, 2)))[:, None]},
        "sees none of the keys that were selected for it",
    ),
    "a mask that is not low": (
        {"scores": lambda s, c: (s * 1e6 - 5e6).masked_fill(~c, -1e4)},
        "tril is not known to keep pairs",
    ),
}


@pytest.mark.parametrize(
    ("name", "form"),
    sweep(
        [(name, form) for name in EXACT for form in FORMS],
        always=[*((name, "by count") for name in EXACT), *(("false scattered", form) for form in FORMS)],
    ),
)
def test_scores_and_masks_that_are_understood(monkeypatch: pytest.MonkeyPatch, name: str, form: str) -> None:
    monkeypatch.setattr(mixing, "GATHER_COST", FORMS[form])
    torch._dynamo.reset()
    model = Written(**EXACT[name])
    assert_same(model, *inputs(prompt=11, response=6))
    assert len(records(step, model, *inputs())["insert_state"].branches[0].choosers) == 1


@pytest.mark.parametrize("name", REFUSED)
def test_scores_and_masks_that_are_refused(name: str) -> None:
    torch._dynamo.reset()
    written, why = REFUSED[name]
    with pytest.raises(LongstrawError, match=why):
        assert_same(Written(**written), *inputs(prompt=11, response=6))


def test_keys_gathered_by_a_selection_in_the_model_are_refused() -> None:
    class Gathers(Written):
        def attend(self, x: Tensor) -> Tensor:
            scores = self.index_query(x)[..., :4] @ self.index_key(x).mT
            causal = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
            places = scores.masked_fill(~causal, float("-inf")).topk(2, -1).indices
            rows = torch.arange(x.shape[0])[:, None, None]
            return super().attend(x) + self.heads(self.value(x)[rows, places].sum(2), 2).repeat_interleave(2, 1)

    torch._dynamo.reset()
    with pytest.raises(LongstrawError, match="picks tokens or rows by index"):
        assert_same(Gathers(), *inputs())
