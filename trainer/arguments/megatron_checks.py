"""Megatron's own checks of its configs (`__post_init__`), run from their source before any rank starts.

Importing them takes three seconds of torch; their bodies alone, compiled with stand-ins for what they import, take milliseconds. What a
stand-in cannot answer (an import of Transformer Engine, a CUDA version) ends the check without a verdict: the ranks make it again, in full.
"""

import ast
import builtins
import enum
import os
from collections.abc import Mapping
from functools import cache
from types import SimpleNamespace
from typing import Any

from slimebus.cli.config import RunConfig
from trainer.arguments.fields import class_of, enum_members, megatron_fields

CHAIN = ("ModelParallelConfig", "TransformerConfig", "MLATransformerConfig")
SECTION = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size", "sequence_parallel")
BRIDGE = {"variable_seq_lengths": True, "moe_token_dispatcher_type": "alltoall", "batch_p2p_comm": False}
"""What trainer/model/gpt.py sets for every model."""


def megatron_refusal(config: RunConfig, values: Mapping[str, Any], shape: Mapping[str, Any]) -> str | None:
    """Why Megatron would refuse these options with this model and layout, in its own words; None where it would not, or cannot be asked."""
    if config.trainer.params_dtype == "auto":  # which it is only a rank knows: refused is what neither would take
        refusals = [_refusal(config, values, shape, Name(dtype)) for dtype in ("bfloat16", "float32")]
        return refusals[0] if all(refusals) else None
    return _refusal(config, values, shape, Name(config.trainer.params_dtype))


def _refusal(config: RunConfig, values: Mapping[str, Any], shape: Mapping[str, Any], dtype: "Name") -> str | None:
    given = {name: shape[name] for name in shape if name in megatron_fields()}
    given |= {"params_dtype": dtype, "pipeline_dtype": dtype, "bf16": dtype == "bfloat16", "expert_tensor_parallel_size": 1}
    given |= {name: getattr(config.trainer, name) for name in SECTION} | BRIDGE | {"activation_func": Name("silu")} | dict(values)
    is_latent = "kv_lora_rank" in shape
    for cls in ("MLATransformerConfig" if is_latent else "TransformerConfig", "DistributedDataParallelConfig"):
        try:
            made = classes()[cls]()
            made.__dict__ |= {name: _default(name) for name, field in megatron_fields().items() if _has(cls, field.owners)}
            made.__dict__ |= {name: _converted(name, value) for name, value in given.items() if _has(cls, megatron_fields()[name].owners)}
            made.__post_init__()
        except (ValueError, AssertionError, NotImplementedError) as refused:
            return " ".join(str(refused).split()) or None
        except Exception:  # noqa: BLE001  # a stand-in that does not answer: left to the ranks
            return None
    return None


class Name(str):
    """A stand-in for what Megatron only compares: torch.float32, F.silu."""

    __slots__ = ()


class Names:
    """A stand-in for a module: each attribute is its own name; called, it does nothing."""

    def __getattr__(self, name: str) -> Any:
        return (lambda *args, **kwargs: None) if name == "warn" else Name(name)


def _import_only_os(name: str, *args: Any, **kwargs: Any) -> Any:
    if name != "os":
        raise ImportError(f"{name}: not before the ranks start")
    return os


@cache
def classes() -> Mapping[str, Any]:
    """Classes that have nothing but the `__post_init__` of Megatron's, by name."""
    scope: dict[str, Any] = {
        "__builtins__": vars(builtins) | {"__import__": _import_only_os},
        "__name__": __name__,
        **{name: enum.Enum(name, list(members)) for name, members in enum_members().items() if members},
        **dict.fromkeys(("torch", "F", "warnings", "Fp8Recipe", "Fp4Recipe"), Names()),
        **dict.fromkeys(("is_te_min_version", "is_torch_min_version"), lambda *args: True),
        **dict.fromkeys(("init_method_normal", "scaled_init_method_normal"), lambda *args, **kwargs: None),
        "quick_gelu": Name("quick_gelu"),
        "HAVE_PACKAGING": True,
        "get_te_version": lambda: "",
    }
    for name in (*CHAIN, "DistributedDataParallelConfig"):
        tree = class_of(name)
        check: list[ast.stmt] = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "__post_init__"]
        bases = [base for base in tree.bases if ast.unparse(base) in CHAIN]
        bare = ast.ClassDef(name=name, bases=bases, keywords=[], body=check or [ast.Pass()], decorator_list=[])
        exec(compile(ast.fix_missing_locations(ast.Module([bare], [])), f"megatron's {name}", "exec"), scope)
    return SimpleNamespace(**scope).__dict__


def _has(cls: str, owners: tuple[str, ...]) -> bool:
    wanted = CHAIN[: CHAIN.index(cls) + 1] if cls in CHAIN else (cls,)
    return not set(owners).isdisjoint(wanted)


def _default(name: str) -> Any:
    text = megatron_fields()[name].default
    try:
        return ast.literal_eval(text) if text else None
    except ValueError:
        last = text.rpartition(".")[2]
        return _converted(name, last)


def _converted(name: str, value: Any) -> Any:
    """Enums as members, dtypes as their names."""
    for word, members in enum_members().items():
        if word in megatron_fields()[name].annotation and value in members:
            return classes()[word][value]
    return Name(value) if "dtype" in megatron_fields()[name].annotation and isinstance(value, str) else value
