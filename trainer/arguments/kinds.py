"""What a field's annotation takes: a value checked against it, and the same in words."""

import ast
import math
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import msgspec

DTYPES = {
    "fp32": "float32",
    "float32": "float32",
    "float": "float32",
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "fp16": "float16",
    "float16": "float16",
    "half": "float16",
    "fp8": "uint8",
}
"""Words for a dtype, Megatron-LM's and torch's, and the torch name of each (Megatron keeps fp8 moments as uint8)."""
NOTHING = ("none", "null", "None", "")
WORDS = {"bool": "true or false", "int": "a whole number", "float": "a number", "str": "text", "list": "a list"}
PLAIN = {"bool": bool, "int": int, "float": float, "str": str}
TEXT_CHOICES: Mapping[str, tuple[str, ...]] = {
    "cp_comm_type": ("p2p", "all_gather", "a2a", "a2a+p2p"),
    "data_parallel_sharding_strategy": ("no_shard", "optim", "optim_grads", "optim_grads_params"),
    "moe_router_load_balancing_type": ("aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none"),
    "offload_modules": ("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act"),
    "optimizer": ("adam", "sgd", "muon", "dist_muon"),
    "recompute_modules": ("core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts"),
    "rope_type": ("rope", "yarn"),
}
"""Fields that are typed as text and whose choices only Megatron's docstrings and checks name."""


class Kind:
    """The type of one field. choices: those of its texts; enums: members of the enums that the annotation names."""

    def __init__(self, annotation: str, choices: tuple[str, ...] = (), enums: Mapping[str, tuple[str, ...]] | None = None) -> None:
        self.tree = ast.parse(annotation, mode="eval").body
        self.choices, self.enums = choices, enums or {}

    @property
    def is_switch(self) -> bool:
        """Whether it is true or false."""
        return any(_name(node) == "bool" for node in _alternatives(self.tree))

    @property
    def is_list(self) -> bool:
        """Whether it may hold several values."""
        return any(_name(node) in ("List", "list", "Tuple") for node in _alternatives(self.tree))

    def read(self, value: Any) -> Any:
        """The value as the field holds it; enums and dtypes as words. Raises ValueError when it does not fit."""
        if isinstance(value, str) and "," in value and any(_name(node) in ("List", "Tuple") for node in _alternatives(self.tree)):
            value = value.split(",")
        for node in _alternatives(self.tree):
            try:
                return self._one(node, value)
            except (ValueError, msgspec.ValidationError):
                continue
        raise ValueError(f"expected {self.words}")

    @property
    def words(self) -> str:
        """What it takes, in words: `one of full, selective, none`."""
        return " or ".join(dict.fromkeys(word for node in _alternatives(self.tree) if (word := self._words(node))))

    def _one(self, node: ast.expr, value: Any) -> Any:
        name, inner = _name(node), _arguments(node)
        if name == "None":
            return _none(value)
        if name == "str" and self.choices:
            return _chosen(value, self.choices)
        if name in PLAIN:
            return _plain(PLAIN[name], value)
        if name == "Literal":
            return _chosen(value, tuple(ast.literal_eval(choice) for choice in inner))
        if name == "dtype":
            return DTYPES[_chosen(value, tuple(DTYPES))]
        if name in self.enums:
            return _chosen(value, self.enums[name])
        if name in ("List", "list", "Tuple"):
            return self._many(inner, value, is_exact=name == "Tuple")
        raise ValueError(name)

    def _many(self, inner: list[ast.expr], value: Any, *, is_exact: bool) -> list[Any]:
        values = value if isinstance(value, list) else [part for part in value.split(",") if part] if isinstance(value, str) else None
        if values is None or (not inner and not isinstance(value, list)) or (is_exact and len(values) != len(inner)):
            raise ValueError
        return [self._one(inner[0], one) for one in values] if inner else values

    def _words(self, node: ast.expr) -> str:
        name, inner = _name(node), _arguments(node)
        if name == "str" and self.choices:
            return f"one of {', '.join(self.choices)}"
        if name == "Literal":
            return f"one of {', '.join(str(ast.literal_eval(choice)) for choice in inner)}"
        if name == "dtype":
            return "one of fp32, bf16, fp16, fp8"
        if name in self.enums:
            return f"one of {', '.join(self.enums[name])}"
        if name == "Tuple":
            return f"{len(inner)} values with commas between"
        if name in ("List", "list") and inner:
            return f"several with commas between, each {self._words(inner[0])}"
        return "none" if name == "None" else WORDS.get(name, "")


@cache
def _parsed_none() -> ast.expr:
    return ast.parse("None", mode="eval").body


def _alternatives(node: ast.expr) -> Iterator[ast.expr]:
    """The types of a Union or Optional; None comes first, as it fits nothing else."""
    name = _name(node)
    if name == "Optional":
        yield _parsed_none()
    if name in ("Optional", "Union"):
        for inner in _arguments(node):
            yield from _alternatives(inner)
    else:
        yield node


def _name(node: ast.expr) -> str:
    if isinstance(node, ast.Subscript):
        return _name(node.value)
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ast.unparse(node)


def _arguments(node: ast.expr) -> list[ast.expr]:
    if not isinstance(node, ast.Subscript):
        return []
    return node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]


def _none(value: Any) -> None:
    if value is not None and value not in NOTHING:
        raise ValueError


def _plain(kind: type, value: Any) -> Any:
    if isinstance(value, bool) and kind is not bool:
        raise ValueError
    if kind is bool and isinstance(value, int) and not isinstance(value, bool):
        raise ValueError
    made: Any = msgspec.convert(value, kind, strict=False)
    if isinstance(made, float) and not math.isfinite(made):
        raise ValueError
    return made


def _chosen(value: Any, choices: tuple[Any, ...]) -> Any:
    word = value.removeprefix("torch.") if isinstance(value, str) else value
    if word not in choices:
        raise ValueError
    return word
