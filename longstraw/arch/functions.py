"""Functions of model code that loop over tokens, and what Dynamo traces in their place: one library scan each.

A table names functions by module and name. Before a function is replaced it is compared with its replacement on small
random inputs; one that computes something else is left alone, and the loop is then refused as any other.
"""

from __future__ import annotations

import inspect
import re
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from longstraw.arch import associative
from longstraw.arch.user_scan import Scan
from longstraw.compat import Substitution
from longstraw.scans.opaque import GATED_DELTA_RULE, LINEAR_ATTENTION, LINEAR_RECURRENCE, REFUSED, SELECTIVE_SCAN

Function = Callable[..., Any]


@dataclass(frozen=True)
class Opaque:
    """A function that is traced as another.

    Attributes:
        name: its name in its module; `Class.method` for a method.
        traceable: what is traced instead; it takes the same arguments.
        sample: `() -> (args, kwargs)` for comparing the two; None when they can't be compared.
        module: pattern of the modules that may define it, matched whole.
    """

    name: str
    traceable: Function
    sample: Callable[[], tuple[tuple[Any, ...], dict[str, Any]]] | None
    module: str = ".*"


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.to(torch.float32)


def _normalised(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def _one_row_after_another(kwargs: Mapping[str, Any]) -> None:
    for name in ("cu_seqlens", "seq_idx"):
        if kwargs.get(name) is not None:
            raise NotImplementedError(f"{name}: several sequences packed in a row can't share a prompt")


def delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    scale: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The delta rule, gated by head or by channel."""
    _one_row_after_another(kwargs)
    q, k = _wide(query), _wide(key)
    if use_qk_l2norm_in_kernel:
        q, k = _normalised(q), _normalised(k)
    q = q * (query.shape[-1] ** -0.5 if scale is None else scale)
    out, last = GATED_DELTA_RULE([q, k, value, _wide(g), beta], initial_state)
    return out.to(query.dtype), last if output_final_state else None


def _in_order(*names: str) -> Function:
    """Return the delta rule with these names for what follows its five inputs by position."""

    def traceable(
        query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, *more: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        return delta_rule(query, key, value, g, beta, **dict(zip(names, more, strict=False)), **kwargs)

    return traceable


delta_rule_by_token = _in_order("initial_state", "output_final_state", "use_qk_l2norm_in_kernel")
delta_rule_in_chunks = _in_order("chunk_size", "initial_state", "output_final_state", "use_qk_l2norm_in_kernel")
"""The size of chunks changes nothing."""


def delta_rule_of_library(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The delta rule as flash-linear-attention's functions take it; gates that its kernels compute are not known."""
    unknown = [name for name, value in kwargs.items() if value]
    if unknown:
        raise NotImplementedError(f"{unknown[0]}: longstraw doesn't know what it does")
    return delta_rule(
        q,
        k,
        v,
        g,
        beta,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
    )


def selective_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    **kwargs: Any,
) -> Any:
    """The selective scan with tokens last, skip connection and gate."""
    _one_row_after_another(kwargs)
    if delta_bias is not None:
        dt = dt + delta_bias.to(dt.dtype)[..., None]
    if delta_softplus:
        dt = F.softplus(dt)
    inputs = [_wide(x).transpose(1, 2) for x in (hidden_states, dt)]
    out, last = SELECTIVE_SCAN([*inputs, _wide(A), _wide(B).transpose(1, 2), _wide(C).transpose(1, 2)], None)
    out = out.transpose(1, 2).to(hidden_states.dtype)
    if D is not None:
        out = out + hidden_states * D[None, :, None]
    if z is not None:
        out = out * F.silu(z)
    return (out, last) if return_last_state else out


def chunk_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **kwargs: Any,
) -> Any:
    """The state space dual's scan: linear attention whose keys and queries are B and C."""
    _one_row_after_another(kwargs)
    if dt_bias is not None:
        dt = dt + dt_bias.to(dt.dtype)
    if dt_softplus:
        dt = F.softplus(dt)
    dt = _wide(torch.clamp(dt, min=dt_limit[0], max=dt_limit[1]))
    x = _wide(hidden_states)
    start = None if initial_states is None else initial_states.transpose(-1, -2)
    out, last = LINEAR_ATTENTION([_wide(C), _wide(B), x * dt[..., None], A.to(x.dtype) * dt], start)
    if D is not None:
        out = out + D[..., None] * x
    return (out, last.transpose(-1, -2)) if return_final_states else out


def short_convolution(
    hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **kwargs: Any
) -> Tensor:
    """A depthwise causal convolution of `[rows, channels, tokens]`, whatever kernel the model would call for it."""
    _one_row_after_another(kwargs)
    x, width = hidden_states.to(weight.dtype), weight.shape[-1]
    out = F.conv1d(x, weight.unsqueeze(1), bias, padding=width - 1, groups=weight.shape[0])
    out = out[:, :, : hidden_states.shape[2]]
    if activation is not None:
        out = F.silu(out) if activation in ("silu", "swish") else getattr(F, activation)(out)
    return out.to(hidden_states.dtype)


def reset_recurrence(
    self: Any,
    hidden_states: Tensor,
    recurrent_gate: Tensor,
    reset: Tensor,
    recurrent_states: Tensor | None,
    acc_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, None]:
    """A gated linear recurrence that `reset` starts anew; what it leaves for a later call is not kept."""
    out, _ = LINEAR_RECURRENCE([_wide(recurrent_gate * ~reset), _wide(hidden_states)], None)
    return out.to(hidden_states.dtype), None


def lightning_attention(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: Any = None,
    attention_mask: Tensor | None = None,
    cache: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """A layer of linear attention whose heads decay at fixed rates."""
    rows, tokens, _ = hidden_states.shape
    qkv = self.act_fn(self.qkv_proj(hidden_states))
    if attention_mask is not None:
        qkv = (qkv * attention_mask[:, :, None]).to(qkv.dtype)
    query, key, value = qkv.reshape(rows, tokens, self.num_attention_heads, 3 * self.head_dim).chunk(3, 3)
    log_decay = -self.slope_rate.flatten().to(_wide(value).dtype).expand(rows, tokens, -1)
    out, _ = LINEAR_ATTENTION([query, key, value, log_decay], None)
    out = self.norm(out.to(value.dtype).flatten(2))
    return self.out_proj(torch.sigmoid(self.output_gate(hidden_states)) * out), None


def with_adapted_parameters(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """A module that runs with low-rank adapters added to parameters of it, such as the weights of all experts.

    The library hooks them into the module for the time of a call, one wrapper for each parameter; here the module is
    called with other values.
    """
    changed = {}
    while hasattr(self, "parameter_name"):
        names = [name for name in self.active_adapters if name in self.lora_A]
        if self.disable_adapters and self.merged:
            raise NotImplementedError("merged adapters are switched off: call unmerge_adapter() before the step")
        if names and not self.disable_adapters and not self.merged:
            value = self.get_param()
            if len(names) == 1 and self.num_experts > 1:
                left, right, scale = self.get_delta_factors(names[0])
                with torch.autocast(value.device.type, enabled=False):
                    value = torch.baddbmm(value, left, right, alpha=scale)
            else:
                for name in names:
                    value = value + self.get_delta_weight(name)
            changed[self.parameter_name] = value
        self = self.base_layer
    return torch.func.functional_call(self, changed, (x, *args), kwargs) if changed else self(x, *args, **kwargs)


def no_fused_kernel(*args: Any, **kwargs: Any) -> None:
    """Stands for a kernel of a whole layer: the layer's own code is traced instead."""


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float32)


def _delta_sample() -> tuple[tuple[Any, ...], dict[str, Any]]:
    q, k, v = _random(2, 5, 2, 4), _random(2, 5, 2, 4), _random(2, 5, 2, 3)
    return (q, k, v), {
        "g": -_random(2, 5, 2).abs(),
        "beta": _random(2, 5, 2).sigmoid(),
        "use_qk_l2norm_in_kernel": True,
    }


def _channel_sample() -> tuple[tuple[Any, ...], dict[str, Any]]:
    args, kwargs = _delta_sample()
    return args, {**kwargs, "g": -_random(2, 5, 2, 4).abs()}


def _convolution_sample() -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (_random(2, 4, 6), _random(4, 3), _random(4)), {"activation": "silu"}


def _selective_sample() -> tuple[tuple[Any, ...], dict[str, Any]]:
    x, dt, b, c = _random(2, 4, 5), _random(2, 4, 5), _random(2, 3, 5), _random(2, 3, 5)
    more = {"D": _random(4), "z": _random(2, 4, 5), "delta_bias": _random(4), "delta_softplus": True}
    return (x, dt, -_random(4, 3).abs(), b, c), more


def _chunk_sample() -> tuple[tuple[Any, ...], dict[str, Any]]:
    x, dt, b, c = _random(2, 5, 4, 3), _random(2, 5, 4), _random(2, 5, 2, 3), _random(2, 5, 2, 3)
    more = {"chunk_size": 4, "D": _random(4), "dt_bias": _random(4), "dt_softplus": True}
    return (x, dt, -_random(4).abs(), b, c), more


def _reset_sample() -> tuple[tuple[Any, ...], dict[str, Any]]:
    reset = torch.tensor([True, False, False, True, False])[None, :, None]
    return (None, _random(2, 5, 3), _random(2, 5, 4)[..., :3].sigmoid(), reset, None), {}


def _lightning_sample() -> tuple[tuple[Any, ...], dict[str, Any]]:
    heads, size, rate = 2, 4, torch.tensor([0.3, 0.7])[:, None, None]
    at = torch.arange(size) + 1
    apart = at[:, None] - at
    layer = types.SimpleNamespace(
        layer_idx=0,
        head_dim=3,
        num_attention_heads=heads,
        block_size=size,
        act_fn=torch.tanh,
        qkv_proj=lambda x: x @ _random(6, 18),
        norm=lambda x: 2 * x,
        output_gate=lambda x: x,
        out_proj=lambda x: x,
        slope_rate=rate,
        query_decay=(-rate * at[:, None]).exp(),
        key_decay=(-rate * (size - at[:, None])).exp(),
        diagonal_decay=torch.where(apart >= 0, -rate * apart, -torch.inf).exp()[None],
    )
    return (layer, _random(2, 5, 6), None, None), {}


FUNCTIONS: tuple[Opaque, ...] = (
    Opaque("torch_chunk_gated_delta_rule", delta_rule_in_chunks, _delta_sample),
    Opaque("torch_recurrent_gated_delta_rule", delta_rule_by_token, _delta_sample),
    Opaque("chunk_kimi_delta_attention", delta_rule_in_chunks, _channel_sample),
    Opaque("recurrent_kimi_delta_attention", delta_rule_by_token, _channel_sample),
    Opaque("causal_conv1d_fn", short_convolution, _convolution_sample),
    Opaque("mamba_selective_scan", selective_scan, _selective_sample),
    Opaque("mamba2_chunk_scan", chunk_scan, _chunk_sample),
    Opaque("RecurrentGemmaRglru._rnn_scan", reset_recurrence, _reset_sample),
    Opaque("MiniMaxLightningAttention.forward", lightning_attention, _lightning_sample),
    Opaque("associative_scan", associative.traceable, None, module=r"torch\._higher_order_ops\.associative_scan"),
    # Kernels for a GPU only, which numbers on the CPU can't be compared with: known by the library that has them.
    Opaque("chunk_gated_delta_rule", delta_rule_of_library, None, module=r"fla\..*"),
    Opaque("chunk_kda", delta_rule_of_library, None, module=r"fla\..*"),
    Opaque("ParamWrapper.forward", with_adapted_parameters, None, module=r"peft\.tuners\.lora\.layer"),
    # Of these the models' own wrappers return None where the kernel is not installed.
    Opaque("mamba_inner_fn", no_fused_kernel, None, module=r"transformers\.models\..*"),
    Opaque("mamba2_split_conv1d_scan_combined", no_fused_kernel, None, module=r"transformers\.models\..*"),
)
"""Functions that longstraw knows."""

_compared: dict[int, tuple[Function, bool]] = {}


def opaque_functions(rules: Iterable[Any] = ()) -> list[Substitution]:
    """Return the functions that are traced as another: of the rules given, and known ones of imported modules."""
    found: dict[Function, Substitution] = {}
    for rule in rules:
        if isinstance(rule, Scan):
            found[rule.function] = Substitution(None, rule.function.__name__, rule.function, _plain(rule))
    for entry in FUNCTIONS:
        pattern = re.compile(entry.module)
        *path, name = entry.name.split(".")
        for module in [m for known, m in list(sys.modules.items()) if pattern.fullmatch(known)]:
            owner: Any = module
            for part in path:
                owner = _members(owner).get(part)
            function = _members(owner).get(name)
            if inspect.isfunction(function) and function not in found and _agrees(function, entry):
                found[function] = Substitution(owner, name, function, entry.traceable)
    return list(found.values())


def _members(owner: Any) -> Mapping[str, Any]:
    """Return what a module or class defines, without setting off what a lazy module does when it is asked."""
    return getattr(owner, "__dict__", None) or {}


def _plain(rule: Scan) -> Function:
    """Return what is traced in place of a rule's function, as a plain function: Dynamo takes no bound method."""
    target, names = rule.target, list(inspect.signature(rule.function).parameters)

    def traceable(*inputs: Tensor, **named: Tensor) -> Tensor:
        ordered = [*inputs, *(named[name] for name in names[len(inputs) :] if name in named)]
        tensors = [x for x in ordered if isinstance(x, Tensor)]
        if len(tensors) < len(ordered):
            given = next(type(x).__name__ for x in ordered if not isinstance(x, Tensor))
            refused: Tensor = REFUSED(
                tensors, f"it is given a value of type {given}, and a rule's function takes tensors only"
            )
            return refused
        found: Tensor = target(ordered, None)[0]
        return found

    return traceable


def _agrees(function: Function, entry: Opaque) -> bool:
    """Return whether a function computes what its replacement does, judged once by numbers."""
    if entry.sample is None:
        return True
    known = _compared.get(id(function))
    if known is None or known[0] is not function:
        _compared[id(function)] = known = (function, _same_numbers(inspect.unwrap(function), entry))
    return known[1]


def _same_numbers(function: Function, entry: Opaque) -> bool:
    assert entry.sample is not None
    try:
        # Whatever the caller's autocast and default device are.
        with torch.no_grad(), torch.autocast("cpu", enabled=False), torch.device("cpu"):
            args, kwargs = entry.sample()
            results = [f(*args, **kwargs) for f in (function, entry.traceable)]
            one, other = (x[0] if isinstance(x, tuple) else x for x in results)
            return one.shape == other.shape and torch.allclose(one.double(), other.double(), rtol=1e-3, atol=1e-4)
    except Exception:
        return False
