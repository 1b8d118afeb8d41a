"""What a step makes of the logits: cuts, reductions and losses on per-token values, equal to eager."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longstraw import errors
from tests.small import VOCABULARY, Tiny, assert_same, inputs, step
from tests.sweeps import sweep


def rows(prompt: Tensor, responses: Tensor) -> Tensor:
    return torch.cat([prompt.expand(responses.shape[0], -1), responses], 1)


def chosen(logits: Tensor, ids: Tensor) -> Tensor:
    return torch.log_softmax(logits, -1).gather(-1, ids[..., None]).squeeze(-1)


def cut_last(model, prompt, responses, weights):
    ids = rows(prompt, responses)
    return chosen(model(ids)[:, :-1], ids[:, 1:])[:, prompt.shape[1] - 1 :].mean()


def cut_last_and_weighted(model, prompt, responses, weights):
    ids = rows(prompt, responses)
    return (chosen(model(ids)[:, :-1], ids[:, 1:])[:, -responses.shape[1] :] * weights).sum()


def cut_twice(model, prompt, responses, weights):
    ids = rows(prompt, responses)
    logp = chosen(model(ids)[:, :-1], ids[:, 1:])
    return logp[:, prompt.shape[1] - 1 :].mean() + logp[:, prompt.shape[1] :].exp().mean()


def labels_rolled(model, prompt, responses, weights):
    ids = rows(prompt, responses)
    logp = chosen(model(ids), ids.roll(-1, 1))[:, prompt.shape[1] - 1 : -1]
    return logp.softmax(1)[:, 0].sum() + logp.amax(1).mean()


def largest(model, prompt, responses, weights):
    return (model(rows(prompt, responses))[:, prompt.shape[1] - 1 : -1].max(-1).values * weights).mean()


def largest_three(model, prompt, responses, weights):
    return model(rows(prompt, responses))[:, prompt.shape[1] - 1 : -1].topk(3, -1).values.mean()


def entropy_cut(model, prompt, responses, weights):
    p = model(rows(prompt, responses)).softmax(-1)
    return -(p * p.log()).sum(-1)[:, prompt.shape[1] - 1 : -1].mean()


def sequence_ratio(model, prompt, responses, weights):
    ids = rows(prompt, responses)
    logp = chosen(model(ids)[:, :-1], ids[:, 1:])[:, prompt.shape[1] - 1 :]
    return (logp.mean(1).exp() * weights[:, 0]).sum()


def smoothed(model, prompt, responses, weights):
    logits = model(rows(prompt, responses))[:, prompt.shape[1] - 1 : -1]
    return F.cross_entropy(logits.flatten(0, 1), responses.flatten(), label_smoothing=0.1)


def smoothed_where_not_ignored(model, prompt, responses, weights):
    logits = model(rows(prompt, responses))[:, prompt.shape[1] - 1 : -1]
    labels = responses.masked_fill(weights < 0, -100)
    losses = F.cross_entropy(logits.mT, labels, label_smoothing=0.2, reduction="none")
    return (losses * weights).sum() + F.cross_entropy(logits.mT, labels, label_smoothing=0.3, reduction="sum")


def response_logits(model, prompt, responses):
    return model(rows(prompt, responses))[:, prompt.shape[1] - 1 : -1]


def chosen_by_one_hot(model, prompt, responses, weights):
    logp = torch.log_softmax(response_logits(model, prompt, responses), -1)
    return ((logp * F.one_hot(responses, VOCABULARY)).sum(-1) * weights).sum()


def chosen_by_indices(model, prompt, responses, weights):
    logp = torch.log_softmax(response_logits(model, prompt, responses), -1)
    row, token = torch.arange(len(responses))[:, None], torch.arange(responses.shape[1])
    return (logp[row, token, responses] * weights).sum() + logp[row, token, responses - VOCABULARY].exp().sum()


def chosen_by_indices_of_flat_logits(model, prompt, responses, weights):
    logp = torch.log_softmax(response_logits(model, prompt, responses), -1).flatten(0, 1)
    return (logp[torch.arange(responses.numel()), responses.flatten()] * weights.flatten()).sum()


def chosen_rows_of_the_head(model, prompt, responses, weights):
    hidden = model.hidden(rows(prompt, responses))[:, prompt.shape[1] - 1 : -1]
    own = (hidden * model.head.weight[responses]).sum(-1) + model.head.bias[responses]
    return ((own - model.head(hidden).logsumexp(-1)) * weights).sum()


def by_a_distribution(model, prompt, responses, weights):
    policy = torch.distributions.Categorical(logits=response_logits(model, prompt, responses))
    return (policy.log_prob(responses) * weights).sum() - 0.1 * policy.entropy().mean()


def divergence_of_all_classes(model, prompt, responses, weights):
    logp = torch.log_softmax(response_logits(model, prompt, responses), -1)
    uniform = torch.full_like(logp, 1 / VOCABULARY).log()
    return (F.kl_div(logp, uniform, log_target=True, reduction="none").sum(-1) * weights).sum()


def classes_with_weights(model, prompt, responses, weights):
    logits, of_class = response_logits(model, prompt, responses), torch.linspace(0.5, 2, VOCABULARY).to(weights)
    labels = responses.masked_fill(weights < 0, -100)
    losses = F.cross_entropy(logits.mT, labels, of_class, reduction="none")
    return (losses * weights).sum() + F.cross_entropy(logits.flatten(0, 1), labels.flatten(), of_class)


def classes_with_weights_and_smoothing(model, prompt, responses, weights):
    logits, of_class = response_logits(model, prompt, responses), torch.linspace(0.5, 2, VOCABULARY).to(weights)
    labels = responses.masked_fill(weights < 0, -100)
    mean = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), of_class, label_smoothing=0.2)
    return mean + F.cross_entropy(logits.mT, labels, of_class, reduction="sum", label_smoothing=0.3)


def classes_with_weights_and_soft_targets(model, prompt, responses, weights):
    logits, of_class = response_logits(model, prompt, responses), torch.linspace(0.5, 2, VOCABULARY).to(weights)
    soft = F.one_hot(responses, VOCABULARY).to(logits) * 0.7 + 0.1
    losses = F.cross_entropy(logits.flatten(0, 1), soft.flatten(0, 1), of_class, reduction="none", label_smoothing=0.1)
    return (losses * weights.flatten()).sum()


def likeness_to_embeddings(model, prompt, responses, weights):
    hidden = model.hidden(rows(prompt, responses))[:, prompt.shape[1] - 1 : -1]
    return (torch.einsum("grd,grd->gr", hidden, model.table(responses)) * weights).sum()


def one_hot_by_einsum(model, prompt, responses, weights):
    logp = torch.log_softmax(response_logits(model, prompt, responses), -1)
    return (torch.einsum("grv,grv->gr", logp, F.one_hot(responses, VOCABULARY).to(logp)) * weights).sum()


def one_hot_by_matmul(model, prompt, responses, weights):
    logp = torch.log_softmax(response_logits(model, prompt, responses), -1)[..., None, :]
    chosen = logp @ F.one_hot(responses, VOCABULARY).to(logp)[..., None]
    return (chosen.squeeze(-1).squeeze(-1) * weights).sum()


def squares_by_einsum(model, prompt, responses, weights):
    logits = response_logits(model, prompt, responses)
    return (torch.einsum("...v,...v", logits, logits) * weights).sum() + torch.einsum("grv->gr", logits).mean()


def next_token_of_the_row(model, prompt, responses, weights):
    logp = torch.log_softmax(model(rows(prompt, responses))[:, -1], -1)
    return (logp[:, 3] * weights[:, 0]).sum()


def a_reward_from_the_last_token(model, prompt, responses, weights):
    last = model.hidden(rows(prompt, responses))[:, -1:].squeeze(1)
    return F.logsigmoid(model.up(last).mean(-1) * weights[:, 0]).sum()


def tokens_one_by_one(model, prompt, responses, weights):
    at = prompt.shape[1]
    hidden = model.hidden(rows(prompt, responses))
    picked = hidden[:, at - 1, :] + hidden[:, 2] * hidden[:, at] + hidden[:, 0]
    return (model.head(picked)[:, 5] * weights[:, 0]).sum()


def head_of_the_last_token(model, prompt, responses, weights):
    logp = torch.log_softmax(model.head(model.hidden(rows(prompt, responses))[:, -1:] * 2), -1)
    return (logp[:, -1, 4] * weights[:, 0]).sum() + logp[:, 0].exp().mean()


LOSSES = [
    head_of_the_last_token,
    next_token_of_the_row,
    a_reward_from_the_last_token,
    tokens_one_by_one,
    chosen_by_one_hot,
    chosen_by_indices,
    chosen_by_indices_of_flat_logits,
    chosen_rows_of_the_head,
    by_a_distribution,
    divergence_of_all_classes,
    classes_with_weights,
    classes_with_weights_and_smoothing,
    classes_with_weights_and_soft_targets,
    likeness_to_embeddings,
    one_hot_by_einsum,
    one_hot_by_matmul,
    squares_by_einsum,
    cut_last,
    cut_last_and_weighted,
    cut_twice,
    labels_rolled,
    largest,
    largest_three,
    entropy_cut,
    sequence_ratio,
    smoothed,
    smoothed_where_not_ignored,
]


@pytest.mark.parametrize("loss", LOSSES)
def test_loss_equals_eager(loss: Callable[..., Tensor]) -> None:
    torch._dynamo.reset()
    assert_same(Tiny(), *inputs(), function=loss)


@pytest.mark.parametrize("replay_rows", sweep([1, 2], always=[1]))
@pytest.mark.parametrize("shape", [(3, 1, 1), (3, 4, 1), (1, 4, 1), ()], ids=str)
def test_temperatures_that_learn_equal_eager(shape: tuple[int, ...], replay_rows: int) -> None:
    """An input that runs over rows or tokens is read by them, whether it needs a gradient or not."""

    def warm(model, prompt, responses, weights, temperature):
        logits = model(rows(prompt, responses))[:, prompt.shape[1] - 1 : -1] / temperature
        return (chosen(logits, responses) * weights).sum()

    generator = torch.Generator().manual_seed(3)
    temperature = (torch.rand(shape, generator=generator, dtype=torch.float64) + 0.5).requires_grad_()
    torch._dynamo.reset()
    assert_same(Tiny(), *inputs(), temperature, function=warm, replay_rows=replay_rows)
    ours, temperature.grad = temperature.grad, None  # of eager's run and the compiled one
    warm(Tiny(), *inputs(), temperature).backward()
    torch.testing.assert_close(ours, 2 * temperature.grad, rtol=1e-10, atol=1e-12)


# --- whole objectives -------------------------------------------------------------------------------------------------


class WithReference(Tiny):
    """A policy and a frozen reference of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.reference = Tiny(inner=20).requires_grad_(False)
        with torch.no_grad():
            self.reference.table.weight.add_(0.3)


KL: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda difference: difference,
    "k2": lambda difference: difference**2 / 2,
    "k3": lambda difference: (-difference).exp() + difference - 1,
}


@pytest.mark.parametrize("estimator", KL)
def test_kl_to_a_reference_that_is_scored_in_the_step(estimator: str) -> None:
    """Estimators as named in http://joschu.net/blog/kl-approx.html; the sampler's ratio is truncated, a constant."""

    def objective(model, prompt, responses, weights):
        ids, start = rows(prompt, responses), prompt.shape[1] - 1
        with torch.no_grad():
            old, reference = (chosen(m(ids)[:, start:-1], responses) for m in (model, model.reference))
            sampler = old - 0.1 * weights  # what an engine with other kernels said
            correction = (old - sampler).exp().clamp(max=1.05)
        new = chosen(model(ids)[:, start:-1], responses)
        ratio = (new - old).exp()
        clipped = torch.minimum(ratio * weights, ratio.clamp(0.8, 1.2) * weights)
        return -(correction * clipped - 0.05 * KL[estimator](new - reference)).mean()

    torch._dynamo.reset()
    assert_same(WithReference(), *inputs(), function=objective)


def test_groups_of_different_sizes_with_advantages_from_rewards() -> None:
    """Two prompts, with one and three responses; rewards, group means and a length penalty computed in the step."""

    def objective(model, ids, groups, rewards, mask):
        counts = torch.zeros(2, dtype=rewards.dtype).index_add(0, groups, torch.ones_like(rewards))
        rewards = rewards - 0.01 * mask.sum(1)
        means = torch.zeros(2, dtype=rewards.dtype).index_add(0, groups, rewards) / counts
        advantages = (rewards - means[groups])[:, None]
        logp = chosen(model(ids)[:, :-1], ids[:, 1:])[:, -mask.shape[1] :]
        kept = torch.where(mask > 0, logp, torch.zeros_like(logp))
        ratio = (kept - kept.detach()).exp()
        loss = -(ratio * advantages * mask).sum() / mask.sum()
        return loss, {"reward": rewards.mean().detach(), "length": mask.sum(1).mean()}

    def loss_alone(*args):
        return objective(*args)[0]

    prompts, responses, _ = inputs(prompt=9, response=4, group=4)
    other = prompts.flip(1)
    ids = torch.cat([torch.cat([other, prompts, prompts, prompts]), responses], 1)
    mask = torch.ones(4, 4, dtype=torch.float64)
    mask[2, 2:] = 0  # truncated
    given = ids, torch.tensor([0, 1, 1, 1]), torch.tensor([0.5, 1.0, 0.0, 0.3], dtype=torch.float64), mask
    torch._dynamo.reset()
    assert_same(Tiny(), *given, function=loss_alone)
    metrics = torch.compile(objective, backend="longstraw")(Tiny(), *given)[1]
    expected = objective(Tiny(), *given)[1]
    for name, value in expected.items():
        torch.testing.assert_close(metrics[name], value, rtol=1e-12, atol=0)


def test_gradients_of_bfloat16_weights_are_summed_in_float32() -> None:
    """Many spans and rows: eager adds once for each weight, longstraw once for each span."""
    exact, model = Tiny(), Tiny().bfloat16()
    exact.attentions = model.attentions = 1  # the keys' bias has a gradient of zero: a second one only adds roundings
    exact.load_state_dict(model.state_dict())
    prompt, responses, weights = inputs(prompt=60, response=8, group=6)
    torch._dynamo.reset()
    options = {"span_tokens": 4, "page_tokens": 2, "replay_rows": 1}
    compiled = torch.compile(step, backend="longstraw", options=options)
    step(exact, prompt, responses, weights).backward()
    found = []
    for run in (step, compiled):
        model.zero_grad()
        run(model, prompt, responses, weights.bfloat16()).backward()
        found.append({name: p.grad for name, p in model.named_parameters()})
    for name, parameter in exact.named_parameters():
        eager, ours = ((grads[name].double() - parameter.grad).norm() for grads in found)
        assert found[1][name].dtype == torch.bfloat16
        assert ours <= 1.5 * eager + 1e-3 * parameter.grad.norm(), name


class ComplexGate(Tiny):
    """A gate computed from pairs taken as complex numbers, which gradients may not enter."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def hidden(self, ids: Tensor) -> Tensor:
        x = super().hidden(ids)
        pairs = self.up(x).view(*x.shape[:2], -1, 2)
        with torch.set_grad_enabled(self.how != "no_grad"):
            z = torch.view_as_complex(pairs)
        z = z.detach() if self.how == "detach" else z
        return x + self.down(torch.tanh(torch.view_as_real(z).flatten(-2)))


@pytest.mark.parametrize("how", ["learns", "no_grad", "detach"])
def test_complex_values_learn_or_do_not_as_in_eager(how: str) -> None:
    torch._dynamo.reset()
    assert_same(ComplexGate(how), *inputs())


def test_labels_may_be_an_input_of_their_own() -> None:
    """Nothing but a gather says that the tokens of the logits' window are as many as the labels."""

    def own_labels(model, ids, labels, weights):
        return (chosen(model(ids)[:, len_prompt - 1 : -1], labels) * weights).sum()

    def last_labels(model, ids, labels, weights):
        return (chosen(model(ids)[:, :-1][:, -labels.shape[1] :], labels) * weights).sum()

    for loss in (own_labels, last_labels):
        torch._dynamo.reset()
        for len_prompt, response in ((9, 4), (9, 6), (13, 6)):
            prompt, responses, weights = inputs(prompt=len_prompt, response=response)
            assert_same(Tiny(), rows(prompt, responses), responses, weights, function=loss)


def last_eight(model, prompt, responses, weights):
    ids = rows(prompt, responses)
    return (chosen(model(ids)[:, -9:-1], ids[:, -8:]) * weights).sum()


def last_eight_twice(model, prompt, responses, weights):
    logits = model(rows(prompt, responses))
    return ((chosen(logits[:, -9:-1], responses) - chosen(logits[:, -8:], responses)) * weights).sum()


def last_eight_rows_of_the_head(model, prompt, responses, weights):
    hidden = model.hidden(rows(prompt, responses))[:, -9:-1]
    return (((hidden * model.head.weight[responses]).sum(-1) - model.head(hidden).logsumexp(-1)) * weights).sum()


def cut_beyond_the_ends(model, prompt, responses, weights):
    ids = rows(prompt, responses)
    return chosen(model(ids)[:, -100:-1][:, :100], ids[:, 1:])[:, -8:].mul(weights).sum()


@pytest.mark.parametrize("function", [last_eight, last_eight_twice, last_eight_rows_of_the_head, cut_beyond_the_ends])
def test_the_length_of_responses_may_be_a_constant(function: Callable[..., Tensor]) -> None:
    torch._dynamo.reset()
    for prompt in (9, 12):
        assert_same(Tiny(), *inputs(prompt=prompt, response=8), function=function)


@pytest.mark.parametrize("group", [3, 1])
@pytest.mark.parametrize(
    "logp",
    [
        lambda x, y: -F.cross_entropy(x.reshape(-1, x.shape[-1]), y.reshape(-1), reduction="none").view(y.shape),
        lambda x, y: -F.nll_loss(x.log_softmax(-1).flatten(0, 1), y.flatten(), reduction="none").reshape(y.shape),
        lambda x, y: -F.cross_entropy(x.mT, y, reduction="none"),
        lambda x, y: chosen(x.view(-1, 1, VOCABULARY), y).view(y.shape),
        lambda x, y: chosen(x.squeeze(1), y.squeeze(1))[:, None],
    ],
    ids=["cross entropy", "nll", "transposed", "viewed", "squeezed"],
)
def test_responses_may_be_one_token_long(logp: Callable[..., Tensor], group: int) -> None:
    def one_token(model, prompt, responses, weights):
        return (logp(response_logits(model, prompt, responses), responses) * weights).sum()

    torch._dynamo.reset()
    assert_same(Tiny(), *inputs(response=1, group=group), function=one_token)


def flat_labels(model, ids, labels, weights):
    logits = model(ids)[:, :-1].flatten(0, 1)
    losses = F.cross_entropy(logits, labels[:, 1:].reshape(-1), reduction="none").view(len(labels), -1)
    return (losses * weights).sum()


def labels_of_the_whole_row(model, ids, labels, weights):
    shifted = F.pad(labels, (0, 1), value=-100)[:, 1:].contiguous()
    return F.cross_entropy(model(ids).flatten(0, 1), shifted.view(-1)) * weights.sum()


def labels_by_gather(model, ids, labels, weights):
    logp = model(ids)[:, :-1].flatten(0, 1).log_softmax(-1).gather(1, labels[:, 1:].reshape(-1, 1))
    return (logp.squeeze(1) * weights.flatten()).sum()


def labels_for_rows_of_the_head(model, ids, labels, weights):
    hidden = model.hidden(ids)[:, :-1]
    return (((hidden * model.head.weight[labels[:, 1:]]).sum(-1) - model.head(hidden).logsumexp(-1)) * weights).sum()


def labels_of_joined_rows(model, ids, labels, weights):
    return flat_labels(model, torch.cat([ids[:, :9], ids[:, 9:] + 0], 1), labels, weights)


@pytest.mark.parametrize(
    "function",
    [flat_labels, labels_of_the_whole_row, labels_by_gather, labels_for_rows_of_the_head, labels_of_joined_rows],
)
def test_flattened_labels_may_be_an_input_of_their_own(function: Callable[..., Tensor]) -> None:
    torch._dynamo.reset()
    for prompt, response, group in ((9, 4, 3), (9, 6, 3), (8, 4, 11)):
        ids = rows(*inputs(prompt, response, group)[:2])
        labels = ids.clone()
        labels[:, :6] = -100 if function in (flat_labels, labels_of_the_whole_row) else 0
        weights = torch.rand(group, ids.shape[1] - 1, dtype=torch.float64)
        assert_same(Tiny(), ids, labels, weights, function=function)


def test_masks_may_come_from_inputs_of_their_own() -> None:
    def masked(model, prompt, responses, mask):
        ids = torch.cat([prompt, responses], 1)
        scored = torch.cat([torch.zeros_like(prompt), mask], 1).bool()
        return flat_labels(model, ids, torch.where(scored, ids, -100), torch.ones(1, dtype=torch.float64))

    torch._dynamo.reset()
    for prompt, response in ((9, 4), (9, 9), (13, 3)):
        ids = rows(*inputs(prompt, response)[:2])
        assert_same(Tiny(), ids[:, :prompt], ids[:, prompt:], torch.ones(3, response).long(), function=masked)


def test_prompts_repeated_by_a_quotient_of_sizes_are_refused() -> None:
    def repeated(model, prompts, responses, weights):
        ids = torch.cat([prompts.repeat_interleave(len(responses) // len(prompts), 0), responses], 1)
        return (chosen(model(ids)[:, prompts.shape[1] - 1 : -1], responses) * weights).sum()

    torch._dynamo.reset()
    prompt, responses, weights = inputs(group=4)
    with pytest.raises(errors.UnsupportedOp, match=r"quotient of two sizes(?s:.)*before the step"):
        assert_same(Tiny(), prompt.repeat(2, 1), responses, weights, function=repeated)


def test_two_inputs_of_other_sizes_are_refused_by_name() -> None:
    def shorter(model, ids, labels):
        return chosen(model(ids)[:, :-1], labels).sum()

    torch._dynamo.reset()
    ids = rows(*inputs()[:2])
    with pytest.raises(errors.UnsupportedOp, match=r"sizes of their own.*labels.*ids"):
        assert_same(Tiny(), ids, ids[:, 5:].clone(), function=shorter)


@pytest.mark.parametrize("group", [3, 8])
@pytest.mark.parametrize("at_once", [1, 2])
def test_the_model_may_run_on_a_few_rows_at_a_time(group: int, at_once: int) -> None:
    def in_turn(model, prompt, responses, weights):
        parts = responses.split(at_once)
        logp = torch.cat([chosen(response_logits(model, prompt, part), part) for part in parts])
        return (logp * weights).sum(1).mean()

    torch._dynamo.reset()
    assert_same(Tiny(), *inputs(group=group), function=in_turn)


def test_the_ignored_class_may_be_an_argument() -> None:
    def masked(model, prompt, responses, weights, pad):
        logits = model(rows(prompt, responses))[:, prompt.shape[1] - 1 : -1]
        labels = responses.masked_fill(weights < 0, pad).flatten()
        return F.cross_entropy(logits.flatten(0, 1), labels, ignore_index=pad)

    torch._dynamo.reset()
    for pad in (-100, 7):
        assert_same(Tiny(), *inputs(), pad, function=masked)


# --- hooks ------------------------------------------------------------------------------------------------------------


def hook_on_logits(model, prompt, responses, weights):
    logits = model(rows(prompt, responses))[:, prompt.shape[1] - 1 : -1]
    logits.register_hook(lambda grad: grad * 3)
    return (chosen(logits, responses) * weights).sum()


def hook_on_results(model, prompt, responses, weights):
    logp = chosen(model(rows(prompt, responses))[:, prompt.shape[1] - 1 : -1], responses)
    logp.register_hook(lambda grad: grad.clamp(-0.1, 0.1))
    return (logp * weights).sum()


@pytest.mark.parametrize("function", [hook_on_logits, hook_on_results])
def test_hooks_on_values_inside_the_step_are_refused(function: Callable[..., Tensor]) -> None:
    torch._dynamo.reset()
    with pytest.raises(errors.UnsupportedOp, match=r"(?s)hook.*register_hook.*on parameters"):
        assert_same(Tiny(), *inputs(), function=function)


def test_hooks_that_a_module_puts_on_its_output_are_refused() -> None:
    model = Tiny()
    model.up.register_forward_hook(lambda module, args, out: out.register_hook(lambda grad: grad * 3) and None)
    torch._dynamo.reset()
    with pytest.raises(errors.UnsupportedOp, match="hook"):
        torch.compile(step, backend="longstraw")(model, *inputs())


def test_hooks_on_parameters_are_called() -> None:
    model = Tiny()
    model.up.weight.register_hook(lambda grad: grad * 3)
    torch._dynamo.reset()
    assert_same(model, *inputs())


@pytest.mark.parametrize("inside", [False, True])
def test_hooks_that_wait_for_a_parameters_grad_are_called_or_refused(inside: bool) -> None:
    """As optimizers that step in the backward register them."""
    model, seen = Tiny(), []

    def own(*args: object) -> Tensor:
        loss = step(*args)
        if inside:
            loss.backward()
            return loss.detach()
        return loss

    torch._dynamo.reset()
    compiled = torch.compile(own, backend="longstraw")
    compiled(model, *inputs())  # a hook that comes after it was compiled
    model.zero_grad()
    model.up.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    if inside:
        with pytest.raises(errors.UnsupportedOp, match=r"(?s)register_post_accumulate_grad_hook.*test_losses.*outside"):
            compiled(model, *inputs())
        assert all(p.grad is None for p in model.parameters())
    else:
        compiled(model, *inputs()).backward()
        assert len(seen) == 1 and torch.equal(seen[0], model.up.weight.grad)


# --- autocast ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["around", "inside"])
def test_an_island_of_float32_under_autocast_is_float32(where: str) -> None:
    """Values, state and gradients of the island are what they are without autocast."""

    def inner(model: nn.Module, *args: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return step(model, *args)

    def mixed(model: nn.Module, *args: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return inner(model, *args)

    model = Tiny().float()
    prompt, responses, weights = inputs(prompt=30)
    given = prompt, responses, weights.float()
    torch._dynamo.reset()
    function = inner if where == "around" else mixed
    compiled = torch.compile(function, backend="longstraw", options={"span_tokens": 4, "page_tokens": 2})
    found = []
    for run in (step, compiled):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=where == "around" and run is compiled):
            loss = run(model, *given)
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in model.parameters())])
    for got, want in zip(found[1], found[0], strict=True):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-6)
