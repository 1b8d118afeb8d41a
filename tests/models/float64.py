"""Models of transformers that compute in float64 throughout, eager and compiled.

Most of them compute some parts in float32 whatever their dtype: norms, softmax, routers, rotary embeddings. Two exact
algorithms then differ by 1e-7, as a difference of 1e-16 flips roundings to float32, and an error of that size can't be
told from noise. ``apply(for_model("llama"))`` rewrites the modelling code, in this process, to say float64 where it
says float32; ``restore()`` undoes it.

The code objects themselves change, so that Dynamo, which traces code objects, sees the same as eager.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import re
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType, ModuleType

import torch
from torch import nn
from transformers import PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING

# As an attribute: torch.float32, torch.float, tensor.float().
RENAMED = {
    "float32": "float64",
    "float": "double",
    "FloatTensor": "DoubleTensor",
    "complex64": "complex128",
    "cfloat": "cdouble",
}
DTYPES = {torch.float32: torch.float64, torch.complex64: torch.complex128}

# Used through registries and decorators, so that a modelling module doesn't always name them.
SHARED = (
    "transformers.activations",
    "transformers.integrations.eager_paged",
    "transformers.integrations.moe",
    "transformers.integrations.sdpa_attention",
    "transformers.loss.loss_utils",
    "transformers.masking_utils",
    "transformers.modeling_layers",
    "transformers.modeling_rope_utils",
    "transformers.pytorch_utils",
)
MODELLING = re.compile(r"transformers\.models\..*\.modeling_\w+")

Original = tuple[CodeType, tuple | None, dict[str, object] | None]
_applied: dict[str, list[tuple[FunctionType, Original]]] = {}  # by module


@contextlib.contextmanager
def float64_inside(*models: str | nn.Module) -> Iterator[None]:
    """Models built, run and traced in here compute in float64 where they'd compute in float32."""
    modules = {module.__name__: module for model in models for module in for_model(model)}
    new = [module for name, module in modules.items() if name not in _applied]
    apply(new)
    try:
        yield
    finally:
        restore(new)


def for_model(model: str | nn.Module) -> list[ModuleType]:
    """The modules of transformers that a model type's (or a model's) modelling code is in."""
    if isinstance(model, nn.Module):
        classes = [type(part) for part in model.modules()]
    else:
        config = CONFIG_MAPPING[model]()
        configs = [type(part) for part in (config, *vars(config).values()) if isinstance(part, PretrainedConfig)]
        classes = []
        for mapping in (MODEL_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING):
            for found in (mapping[config] for config in configs if config in mapping):
                classes += found if isinstance(found, tuple) else [found]
    pending = list(dict.fromkeys(base.__module__ for cls in classes for base in cls.__mro__)) + list(SHARED)
    modules: dict[str, ModuleType] = {}
    while pending:
        name = pending.pop()
        if name in modules or not (name in SHARED or MODELLING.fullmatch(name)):
            continue
        modules[name] = importlib.import_module(name)
        pending += {getattr(value, "__module__", None) or "" for value in vars(modules[name]).values()}
    return list(modules.values())


def apply(modules: Iterable[ModuleType]) -> None:
    """Make every function written in `modules` say float64 for float32. Before a model of them is built."""
    new = {module.__file__: module for module in modules if module.__name__ not in _applied}
    if not new:
        return
    for module in new.values():
        _applied[module.__name__] = []
    # The collector knows every function there is: methods, what decorators wrap, what registries hold.
    for function in gc.get_objects():
        if type(function) is not FunctionType or function.__code__.co_filename not in new:
            continue
        original = (function.__code__, function.__defaults__, function.__kwdefaults__)
        code = in_float64(function.__code__)
        if code is not function.__code__:
            # The builtin shares its name with the attribute.
            function.__globals__.setdefault("double", float)
            function.__code__ = code
        if any(is_narrow(value) for value in function.__defaults__ or ()):
            function.__defaults__ = tuple(widened(value) for value in function.__defaults__)
        if any(is_narrow(value) for value in (function.__kwdefaults__ or {}).values()):
            function.__kwdefaults__ = {name: widened(value) for name, value in function.__kwdefaults__.items()}
        now = (function.__code__, function.__defaults__, function.__kwdefaults__)
        if any(left is not right for left, right in zip(original, now, strict=True)):
            _applied[new[original[0].co_filename].__name__].append((function, original))


def restore(modules: Iterable[ModuleType] | None = None) -> None:
    """Undo `apply`, for these modules or for all."""
    names = list(_applied) if modules is None else [module.__name__ for module in modules]
    for name in names:
        for function, (code, defaults, keywords) in _applied.pop(name, ()):
            function.__code__, function.__defaults__, function.__kwdefaults__ = code, defaults, keywords
            if function.__globals__.get("double") is float:
                del function.__globals__["double"]


def in_float64(code: CodeType) -> CodeType:
    """A code object, and those in it, with the names changed; itself where there is nothing to change."""
    names = tuple(RENAMED.get(name, name) for name in code.co_names)
    constants = tuple(in_float64(value) if isinstance(value, CodeType) else value for value in code.co_consts)
    if names == code.co_names and all(a is b for a, b in zip(constants, code.co_consts, strict=True)):
        return code
    return code.replace(co_names=names, co_consts=constants)


def is_narrow(value: object) -> bool:
    """Whether a value is a dtype of single precision."""
    return isinstance(value, torch.dtype) and value in DTYPES


def widened(value: object) -> object:
    """A dtype of double precision for one of single; anything else as it is."""
    return DTYPES[value] if is_narrow(value) else value
