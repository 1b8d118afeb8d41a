"""GRPO training steps as people write them, with inputs for each: the programs that longstraw must not change.

A step is a plain function of a model and of keyword inputs. ``STEPS[name]`` holds it with its sizes, what makes its
inputs, and who runs backward. ``STEPS[name].inputs(model)`` gives the keyword inputs.

Shapes: P prompt tokens, R response tokens, G responses, V vocabulary.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB = 128
PAD = 1


# --- pieces that several steps share: log-probabilities [G, R] and losses ---


def selected_logp(logits: Tensor, tokens: Tensor) -> Tensor:
    """Log-probabilities of `tokens` [G, R] under `logits` [G, R, V]."""
    return torch.log_softmax(logits, -1).gather(-1, tokens[..., None]).squeeze(-1)


def clipped(logp: Tensor, old_logp: Tensor, advantages: Tensor, low: float = 0.2, high: float = 0.2) -> Tensor:
    """The clipped policy loss of each token, [G, R]."""
    ratio = (logp - old_logp).exp()
    scale = advantages[:, None]
    return -torch.min(ratio * scale, ratio.clamp(1 - low, 1 + high) * scale)


def row_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over each row's tokens, then over rows."""
    return ((values * mask).sum(1) / mask.sum(1).clamp(min=1)).mean()


def token_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over all tokens that count."""
    return (values * mask).sum() / mask.sum().clamp(min=1)


def response_logp(model: nn.Module, prompt: Tensor, responses: Tensor) -> Tensor:
    """Log-probabilities [G, R] of the responses after one prompt [1, P]."""
    ids = torch.cat([prompt.expand(responses.shape[0], -1), responses], 1)
    logits = model(input_ids=ids, use_cache=False).logits
    return selected_logp(logits[:, prompt.shape[1] - 1 : -1], responses)


# --- how the rows reach the model, and how the logits are cut ---


def grpo(model, prompt, responses, mask, old_logp, advantages):
    ids = torch.cat([prompt.expand(responses.shape[0], -1), responses], 1)
    logits = model(input_ids=ids, use_cache=False).logits[:, prompt.shape[1] - 1 : -1]
    logp = torch.log_softmax(logits, -1).gather(-1, responses[..., None]).squeeze(-1)
    return row_mean(clipped(logp, old_logp, advantages), mask)


def repeat_prompt(model, prompt, responses, mask, old_logp, advantages):
    ids = torch.cat([prompt.repeat(responses.size(0), 1), responses], dim=1)
    logits = model(ids).logits
    logits = logits[:, prompt.size(1) - 1 : -1, :]
    return token_mean(clipped(selected_logp(logits, responses), old_logp, advantages), mask)


def rows(model, ids, prompt_tokens, mask, old_logp, advantages):
    logits = model(input_ids=ids, use_cache=False).logits[:, prompt_tokens - 1 : -1]
    logp = selected_logp(logits, ids[:, prompt_tokens:])
    return row_mean(clipped(logp, old_logp, advantages), mask)


def rows_logits_to_keep(model, ids, prompt_tokens, mask, old_logp, advantages):
    num_kept = ids.shape[1] - prompt_tokens
    logits = model(input_ids=ids, use_cache=False, logits_to_keep=num_kept + 1).logits[:, :-1]
    logp = selected_logp(logits, ids[:, -num_kept:])
    return token_mean(clipped(logp, old_logp, advantages), mask)


def logits_to_keep(model, prompt, responses, mask, old_logp, advantages):
    ids = torch.cat([prompt.expand(responses.shape[0], -1), responses], 1)
    logits = model(input_ids=ids, use_cache=False, logits_to_keep=responses.shape[1] + 1).logits[:, :-1]
    return row_mean(clipped(selected_logp(logits, responses), old_logp, advantages), mask)


def full_logits_masked(model, ids, full_mask, full_old_logp, advantages):
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    logp = selected_logp(logits, ids[:, 1:])
    return token_mean(clipped(logp, full_old_logp, advantages), full_mask)


def padded_batch(model, ids, attention_mask, position_ids, prompt_tokens, mask, old_logp, advantages):
    outputs = model(input_ids=ids, attention_mask=attention_mask, position_ids=position_ids, use_cache=False)
    logp = selected_logp(outputs.logits[:, prompt_tokens - 1 : -1], ids[:, prompt_tokens:])
    return row_mean(clipped(logp, old_logp, advantages), mask)


def attention_mask_only(model, prompt, responses, mask, old_logp, advantages):
    ids = torch.cat([prompt.expand(responses.shape[0], -1), responses], 1)
    attention_mask = torch.cat([torch.ones_like(prompt).expand(responses.shape[0], -1), (responses != PAD).long()], 1)
    logits = model(input_ids=ids, attention_mask=attention_mask, use_cache=False).logits[:, prompt.shape[1] - 1 : -1]
    return token_mean(clipped(selected_logp(logits, responses), old_logp, advantages), mask)


def positions_only(model, prompt, responses, mask, old_logp, advantages):
    ids = torch.cat([prompt.expand(responses.shape[0], -1), responses], 1)
    positions = torch.arange(ids.shape[1]).expand(ids.shape[0], -1)
    logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits[:, prompt.shape[1] - 1 : -1]
    return row_mean(clipped(selected_logp(logits, responses), old_logp, advantages), mask)


def inputs_embeds(model, prompt_embeds, responses, mask, old_logp, advantages):
    embeds = model.get_input_embeddings()(responses)
    embeds = torch.cat([prompt_embeds.expand(responses.shape[0], -1, -1), embeds], 1)
    logits = model(inputs_embeds=embeds, use_cache=False).logits[:, prompt_embeds.shape[1] - 1 : -1]
    return row_mean(clipped(selected_logp(logits, responses), old_logp, advantages), mask)


# --- log-probabilities ---


def logp_by_logsumexp(model, prompt, responses, mask, old_logp, advantages):
    ids = torch.cat([prompt.expand(responses.shape[0], -1), responses], 1)
    logits = model(input_ids=ids, use_cache=False).logits[:, prompt.shape[1] - 1 : -1]
    picked = torch.gather(logits, -1, responses.unsqueeze(-1)).squeeze(-1)
    logp = picked - torch.logsumexp(logits, dim=-1)
    return row_mean(clipped(logp, old_logp, advantages), mask)


def logp_by_cross_entropy(model, prompt, responses, mask, old_logp, advantages):
    ids = torch.cat([prompt.expand(responses.shape[0], -1), responses], 1)
    logits = model(input_ids=ids, use_cache=False).logits[:, prompt.shape[1] - 1 : -1]
    logp = -F.cross_entropy(logits.flatten(0, 1), responses.flatten(), reduction="none").view_as(responses)
    return row_mean(clipped(logp, old_logp, advantages), mask)


def logp_by_cross_entropy_reshape(model, ids, prompt_tokens, mask, old_logp, advantages):
    logits = model(input_ids=ids, use_cache=False).logits
    logits = logits[:, prompt_tokens - 1 : -1, :].contiguous()
    labels = ids[:, prompt_tokens:].contiguous()
    loss = F.cross_entropy(logits.view(-1, logits.size(-1)), labels.reshape(-1), reduction="none")
    return token_mean(clipped(-loss.reshape(labels.shape), old_logp, advantages), mask)


def logp_transposed_cross_entropy(model, prompt, responses, mask, old_logp, advantages):
    ids = torch.cat([prompt.expand(responses.shape[0], -1), responses], 1)
    logits = model(input_ids=ids, use_cache=False).logits[:, prompt.shape[1] - 1 : -1]
    logp = -F.cross_entropy(logits.transpose(1, 2), responses, reduction="none")
    return row_mean(clipped(logp, old_logp, advantages), mask)


def logp_row_by_row(model, prompt, responses, mask, old_logp, advantages):
    ids = torch.cat([prompt.expand(responses.shape[0], -1), responses], 1)
    logits = model(input_ids=ids, use_cache=False).logits[:, prompt.shape[1] - 1 : -1]
    logp = torch.stack([selected_logp(row, tokens) for row, tokens in zip(logits, responses, strict=True)])
    return row_mean(clipped(logp, old_logp, advantages), mask)


def logp_in_groups_of_rows(model, prompt, responses, mask, old_logp, advantages):
    ids = torch.cat([prompt.expand(responses.shape[0], -1), responses], 1)
    logits = model(input_ids=ids, use_cache=False).logits[:, prompt.shape[1] - 1 : -1]
    groups = zip(logits.chunk(2), responses.chunk(2), strict=True)
    logp = torch.cat([selected_logp(group, tokens) for group, tokens in groups])
    return row_mean(clipped(logp, old_logp, advantages), mask)


def entropy_in_groups_of_tokens(model, prompt, responses, mask, old_logp, advantages):
    ids = torch.cat([prompt.expand(responses.shape[0], -1), responses], 1)
    logits = model(input_ids=ids, use_cache=False).logits[:, prompt.shape[1] - 1 : -1]
    entropies = []
    for group in logits.reshape(-1, logits.shape[-1]).split(4):
        all_logp = F.log_softmax(group, dim=-1)
        entropies.append(-(all_logp.exp() * all_logp).sum(-1))
    entropy = torch.cat(entropies).reshape(responses.shape)
    policy = row_mean(clipped(selected_logp(logits, responses), old_logp, advantages), mask)
    return policy - 0.01 * token_mean(entropy, mask), entropy.detach()


def temperature(model, prompt, responses, mask, old_logp, advantages):
    ids = torch.cat([prompt.expand(responses.shape[0], -1), responses], 1)
    logits = model(input_ids=ids, use_cache=False).logits[:, prompt.shape[1] - 1 : -1] / 0.7
    return row_mean(clipped(selected_logp(logits, responses), old_logp, advantages), mask)


def float32_logp(model, prompt, responses, mask, old_logp, advantages):
    ids = torch.cat([prompt.expand(responses.shape[0], -1), responses], 1)
    logits = model(input_ids=ids, use_cache=False).logits[:, prompt.shape[1] - 1 : -1]
    logp = selected_logp(logits.float(), responses)
    return row_mean(clipped(logp, old_logp.float(), advantages.float()), mask.float())


def entropy_bonus(model, prompt, responses, mask, old_logp, advantages):
    ids = torch.cat([prompt.expand(responses.shape[0], -1), responses], 1)
    logits = model(input_ids=ids, use_cache=False).logits[:, prompt.shape[1] - 1 : -1] / 0.9
    all_logp = torch.log_softmax(logits, -1)
    logp = all_logp.gather(-1, responses[..., None]).squeeze(-1)
    entropy = -(all_logp.exp() * all_logp).sum(-1)
    policy = row_mean(clipped(logp, old_logp, advantages), mask)
    mean_entropy = token_mean(entropy, mask)
    return policy - 0.01 * mean_entropy, mean_entropy.detach()


def entropy_by_softmax(model, prompt, responses, mask, old_logp, advantages):
    ids = torch.cat([prompt.expand(responses.shape[0], -1), responses], 1)
    logits = model(input_ids=ids, use_cache=False).logits[:, prompt.shape[1] - 1 : -1]
    probabilities = F.softmax(logits, dim=-1)
    entropy = torch.logsumexp(logits, dim=-1) - (probabilities * logits).sum(-1)
    loss = row_mean(clipped(selected_logp(logits, responses), old_logp, advantages), mask)
    return loss, entropy.detach()


# --- losses ---


def token_mean_loss(model, prompt, responses, mask, old_logp, advantages):
    return token_mean(clipped(response_logp(model, prompt, responses), old_logp, advantages), mask)


def dr_grpo(model, prompt, responses, mask, old_logp, advantages):
    losses = clipped(response_logp(model, prompt, responses), old_logp, advantages)
    return (losses * mask).sum() / (mask.size(0) * 64)


def dapo(model, prompt, responses, mask, old_logp, advantages):
    losses = clipped(response_logp(model, prompt, responses), old_logp, advantages, low=0.2, high=0.28)
    return token_mean(losses, mask)


def gspo(model, prompt, responses, mask, old_logp, advantages):
    logp = response_logp(model, prompt, responses)
    log_ratio = ((logp - old_logp) * mask).sum(-1) / mask.sum(-1).clamp(min=1)
    ratio = log_ratio.exp()
    return -torch.min(ratio * advantages, ratio.clamp(1 - 0.03, 1 + 0.04) * advantages).mean()


def gspo_token(model, prompt, responses, mask, old_logp, advantages):
    logp = response_logp(model, prompt, responses)
    sequence = ((logp - old_logp) * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
    ratio = (logp - logp.detach() + sequence.detach()).exp()
    scale = advantages[:, None]
    return row_mean(-torch.min(ratio * scale, ratio.clamp(0.97, 1.04) * scale), mask)


def cispo(model, prompt, responses, mask, old_logp, advantages):
    logp = response_logp(model, prompt, responses)
    weight = (logp - old_logp).exp().clamp(max=1.2).detach()
    return token_mean(-weight * advantages[:, None] * logp, mask)


def kl_penalty(model, prompt, responses, mask, old_logp, ref_logp, advantages):
    logp = response_logp(model, prompt, responses)
    gap = ref_logp - logp
    kl = gap.exp() - gap - 1
    return row_mean(clipped(logp, old_logp, advantages) + 0.04 * kl, mask)


def on_policy(model, prompt, responses, mask, advantages):
    logp = response_logp(model, prompt, responses)
    return row_mean(clipped(logp, logp.detach(), advantages), mask)


def rewards_inside(model, prompt, responses, mask, old_logp, rewards):
    advantages = (rewards - rewards.mean()) / (rewards.std(unbiased=False) + 1e-4)
    return row_mean(clipped(response_logp(model, prompt, responses), old_logp, advantages), mask)


def old_policy_inside(model, prompt, responses, mask, advantages):
    with torch.no_grad():
        old_logp = response_logp(model, prompt, responses)
    return row_mean(clipped(response_logp(model, prompt, responses), old_logp - 0.1, advantages), mask)


# --- what comes back ---


def returns_tuple(model, prompt, responses, mask, old_logp, advantages):
    logp = response_logp(model, prompt, responses)
    return row_mean(clipped(logp, old_logp, advantages), mask), logp.detach()


def returns_metrics(model, prompt, responses, mask, old_logp, ref_logp, advantages):
    logp = response_logp(model, prompt, responses)
    ratio = (logp - old_logp).exp()
    loss = row_mean(clipped(logp, old_logp, advantages), mask)
    with torch.no_grad():
        outside = ((ratio < 0.8) | (ratio > 1.2)).to(logp.dtype)
        metrics = {
            "clip_fraction": token_mean(outside, mask),
            "kl": token_mean((ref_logp - logp).exp() - (ref_logp - logp) - 1, mask),
            "max_ratio": ratio.max(),
        }
    return {"loss": loss, **metrics}


# --- who runs backward ---


def backward_inside(model, prompt, responses, mask, old_logp, advantages):
    loss = row_mean(clipped(response_logp(model, prompt, responses), old_logp, advantages), mask)
    loss.backward()
    return loss.detach()


def scaled_backward_inside(model, prompt, responses, mask, old_logp, advantages):
    losses = clipped(response_logp(model, prompt, responses), old_logp, advantages)
    (token_mean(losses, mask) / 4).backward()


def optimizer_inside(model, optimizer, prompt, responses, mask, old_logp, advantages):
    optimizer.zero_grad()
    loss = row_mean(clipped(response_logp(model, prompt, responses), old_logp, advantages), mask)
    loss.backward()
    optimizer.step()
    return loss.detach()


def micro_batches(model, prompt, responses, mask, old_logp, advantages):
    total = torch.zeros((), dtype=old_logp.dtype)
    for index in range(responses.shape[0]):
        part = slice(index, index + 1)
        losses = clipped(response_logp(model, prompt, responses[part]), old_logp[part], advantages[part])
        loss = row_mean(losses, mask[part]) / responses.shape[0]
        loss.backward()
        total = total + loss.detach()
    return total


def gradients_by_autograd_grad(model, prompt, responses, mask, old_logp, advantages):
    loss = row_mean(clipped(response_logp(model, prompt, responses), old_logp, advantages), mask)
    return loss.detach(), torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad])


def score_only(model, prompt, responses):
    with torch.no_grad():
        return response_logp(model, prompt, responses)


def autocast_float32_logp(model, prompt, responses, mask, old_logp, advantages):
    ids = torch.cat([prompt.expand(responses.shape[0], -1), responses], 1)
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(input_ids=ids, use_cache=False).logits[:, prompt.shape[1] - 1 : -1]
    return row_mean(clipped(selected_logp(logits.float(), responses), old_logp, advantages), mask)


def autocast_inside(model, prompt, responses, mask, old_logp, advantages):
    with torch.autocast("cpu", torch.bfloat16):
        logp = response_logp(model, prompt, responses)
    return row_mean(clipped(logp, old_logp, advantages), mask)


# --- inputs ---


def tokens(generator: torch.Generator, *shape: int) -> Tensor:
    """Random tokens that are never the padding token."""
    return torch.randint(2, VOCAB, shape, generator=generator)


def common_inputs(model: nn.Module, *, prompt: int, response: int, group: int, seed: int, dtype: torch.dtype) -> dict:
    """Every input that a step may ask for. The last row of the responses is padded on the right when R > 2."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    prompt_ids, responses = tokens(generator, 1, prompt), tokens(generator, group, response)
    mask = torch.ones(group, response, dtype=dtype)
    if response > 2:
        responses[-1, -2:] = PAD
        mask[-1, -2:] = 0
    width = model.get_input_embeddings().weight.shape[-1]
    values = {
        "prompt": prompt_ids,
        "responses": responses,
        "mask": mask,
        "advantages": noise(group),
        "rewards": noise(group),
        "prompt_embeds": (0.2 * noise(1, prompt, width)).requires_grad_(),
    }
    values["ids"] = torch.cat([prompt_ids.expand(group, -1), responses], 1)
    values["prompt_tokens"] = prompt
    return values


def with_logp(model: nn.Module, values: dict, generator: torch.Generator) -> dict:
    """Adds what follows from the rows: masks, positions, and old and reference log-probabilities near the model's."""
    ids, mask, num_prompt = values["ids"], values["mask"], values["prompt_tokens"]

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(mask.dtype)

    values["attention_mask"] = (ids != PAD).long()
    values["position_ids"] = (values["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits
        logp = selected_logp(logits[:, :-1].to(mask.dtype), ids[:, 1:])
    values["full_old_logp"] = logp + 0.2 * noise(*logp.shape)
    values["full_mask"] = torch.cat([torch.zeros(ids.shape[0], num_prompt - 1, dtype=mask.dtype), mask], 1)
    values["old_logp"] = values["full_old_logp"][:, num_prompt - 1 :].contiguous()
    values["ref_logp"] = values["old_logp"] + 0.1 * noise(*mask.shape)
    return values


Change = Callable[[dict, torch.Generator], None]


def two_prompts(values: dict, generator: torch.Generator) -> None:
    """The last row has another prompt of the same length."""
    values["ids"][-1, : values["prompt_tokens"]] = tokens(generator, values["prompt_tokens"])


def left_padded(values: dict, generator: torch.Generator) -> None:
    """The prompt begins with three pads, in every row."""
    values["ids"][:, :3] = PAD


def unequal_prompts(values: dict, generator: torch.Generator) -> None:
    """Each row has its own prompt, padded on the left to one length."""
    num_prompt = values["prompt_tokens"]
    for index, row in enumerate(values["ids"]):
        row[:num_prompt] = tokens(generator, num_prompt)
        row[:index] = PAD


def empty_response(values: dict, generator: torch.Generator) -> None:
    """The first response is all padding."""
    values["responses"][0] = PAD
    values["ids"][0, values["prompt_tokens"] :] = PAD
    values["mask"][0] = 0


def tool_tokens(values: dict, generator: torch.Generator) -> None:
    """Tokens that a tool wrote stand inside each response: attended, not trained."""
    values["mask"][:, 1:3] = 0


def equal_responses(values: dict, generator: torch.Generator) -> None:
    """All responses are the same."""
    values["responses"][:] = values["responses"][:1].clone()
    values["ids"][:, values["prompt_tokens"] :] = values["responses"]


def nothing_trained(values: dict, generator: torch.Generator) -> None:
    """No token counts."""
    values["mask"].zero_()


# --- the registry ---


@dataclass(frozen=True)
class Step:
    """One step with its sizes.

    `backward` says who runs it: "caller" (on the loss that the step returns, alone or first or under "loss"),
    "step", or "nobody". `calls` runs it that often without clearing gradients. `change` edits the common inputs,
    `prepare` the model. With `optimizer` the function also takes one, made for the model at hand.
    """

    function: Callable
    prompt: int = 19
    response: int = 5
    group: int = 3
    backward: str = "caller"
    calls: int = 1
    change: Change | None = None
    prepare: Callable[[nn.Module], object] = lambda model: None
    context: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext
    dtype: torch.dtype = torch.float64
    one_graph: bool = True
    optimizer: bool = False

    def inputs(
        self,
        model: nn.Module,
        *,
        prompt: int | None = None,
        response: int | None = None,
        group: int | None = None,
        seed: int = 0,
        dtype: torch.dtype | None = None,
    ) -> dict:
        """The keyword inputs of the function, of these sizes or of the step's own."""
        sizes = {"prompt": prompt or self.prompt, "response": response or self.response, "group": group or self.group}
        values = common_inputs(model, **sizes, seed=seed, dtype=dtype or self.dtype)
        generator = torch.Generator().manual_seed(seed + 1)
        if self.change:
            self.change(values, generator)
        values = with_logp(model, values, generator)
        wanted = inspect.signature(self.function).parameters
        return {name: value for name, value in values.items() if name in wanted}


def freeze_first_layer(model: nn.Module) -> None:
    """Only the last layer and the head train."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.0." not in name and "embed" not in name)


def freeze_all_but_queries(model: nn.Module) -> None:
    """As adapters do: few parameters train, deep inside the model."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("q_proj" in name)


def bfloat16_autocast() -> contextlib.AbstractContextManager:
    """Automatic mixed precision around the step."""
    return torch.autocast("cpu", torch.bfloat16)


STEPS: dict[str, Step] = {
    "grpo": Step(grpo),
    "repeat_prompt": Step(repeat_prompt),
    "rows": Step(rows),
    "rows_two_prompts": Step(rows, change=two_prompts),
    "rows_logits_to_keep": Step(rows_logits_to_keep),
    "logits_to_keep": Step(logits_to_keep),
    "full_logits_masked": Step(full_logits_masked),
    "padded_batch": Step(padded_batch),
    "padded_batch_left": Step(padded_batch, change=left_padded),
    "padded_batch_unequal_prompts": Step(padded_batch, change=unequal_prompts),
    "padded_batch_empty_response": Step(padded_batch, change=empty_response),
    "attention_mask_only": Step(attention_mask_only),
    "attention_mask_empty_response": Step(attention_mask_only, change=empty_response),
    "positions_only": Step(positions_only),
    "inputs_embeds": Step(inputs_embeds),
    "logp_by_logsumexp": Step(logp_by_logsumexp),
    "logp_by_cross_entropy": Step(logp_by_cross_entropy),
    "logp_by_cross_entropy_reshape": Step(logp_by_cross_entropy_reshape),
    "logp_transposed_cross_entropy": Step(logp_transposed_cross_entropy),
    "logp_row_by_row": Step(logp_row_by_row),
    "logp_in_groups_of_rows": Step(logp_in_groups_of_rows),
    "entropy_in_groups_of_tokens": Step(entropy_in_groups_of_tokens),
    "temperature": Step(temperature),
    "float32_logp": Step(float32_logp, dtype=torch.float32),
    "entropy_bonus": Step(entropy_bonus),
    "entropy_by_softmax": Step(entropy_by_softmax),
    "token_mean_loss": Step(token_mean_loss),
    "dr_grpo": Step(dr_grpo),
    "dapo": Step(dapo),
    "gspo": Step(gspo),
    "gspo_token": Step(gspo_token),
    "cispo": Step(cispo),
    "kl_penalty": Step(kl_penalty),
    "on_policy": Step(on_policy),
    "rewards_inside": Step(rewards_inside),
    "old_policy_inside": Step(old_policy_inside),
    "returns_tuple": Step(returns_tuple),
    "returns_metrics": Step(returns_metrics),
    "backward_inside": Step(backward_inside, backward="step", one_graph=False),
    "scaled_backward_inside": Step(scaled_backward_inside, backward="step", one_graph=False),
    "optimizer_inside": Step(optimizer_inside, optimizer=True, backward="step", one_graph=False),
    "micro_batches": Step(micro_batches, backward="step", one_graph=False),
    "gradients_by_autograd_grad": Step(gradients_by_autograd_grad, backward="nobody", one_graph=False),
    "score_only": Step(score_only, backward="nobody"),
    "under_no_grad": Step(grpo, backward="nobody", context=torch.no_grad),
    "autocast_outside": Step(grpo, context=bfloat16_autocast, dtype=torch.float32),
    "autocast_inside": Step(autocast_inside, dtype=torch.float32),
    "autocast_float32_logp": Step(autocast_float32_logp, dtype=torch.float32),
    "train_mode": Step(grpo, prepare=nn.Module.train),
    "two_calls_accumulate": Step(grpo, calls=2),
    "two_calls_accumulate_inside": Step(backward_inside, backward="step", calls=2, one_graph=False),
    "two_optimizer_steps": Step(optimizer_inside, optimizer=True, backward="step", calls=2, one_graph=False),
    "frozen_first_layer": Step(grpo, prepare=freeze_first_layer),
    "frozen_but_queries": Step(grpo, prepare=freeze_all_but_queries),
    "tool_tokens": Step(grpo, change=tool_tokens),
    "equal_responses": Step(grpo, change=equal_responses),
    "nothing_trained": Step(grpo, change=nothing_trained),
    "one_response_token": Step(grpo, response=1),
    "one_response": Step(grpo, group=1),
    "one_prompt_token": Step(grpo, prompt=1),
    "one_of_each": Step(rows, prompt=1, response=1, group=1),
    "prompt_equals_response": Step(grpo, prompt=6, response=6),
    "long_response": Step(token_mean_loss, prompt=5, response=17, group=2),
}
