"""What a field's annotation takes: a value checked against it, and the same in words."""

import ast
import contextlib
import math
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, Literal, get_origin

import msgspec

DTYPES = {
    **dict.fromkeys(("fp32", "float32", "float"), "float32"),
    **dict.fromkeys(("bf16", "bfloat16"), "bfloat16"),
    **dict.fromkeys(("fp16", "float16", "half"), "float16"),
    "fp8": "uint8",
}
"""Words for a dtype, Megatron-LM's and torch's, and the torch name of each (Megatron keeps fp8 moments as uint8)."""
NOTHING = (None, "none", "null", "None", "")
PLAIN: Mapping[str, tuple[Any, str]] = {
    "None": (None, "none"),
    "bool": (bool, "true or false"),
    "int": (int, "a whole number"),
    "float": (float, "a number"),
    "str": (str, "text"),
    "list": (list, "a list"),
}
"""What msgspec checks a value against, and the same in words."""


class Kind:
    """The type of one field. choices: those of its texts; enums: members of the enums that the annotation names."""

    def __init__(self, annotation: str, choices: tuple[str, ...] = (), enums: Mapping[str, tuple[str, ...]] | None = None) -> None:
        self._choices = {"str": choices, "dtype": tuple(DTYPES), **(enums or {})}
        alternatives = list(_alternatives(ast.parse(annotation, mode="eval").body))
        self._names = {_name(node) for node in alternatives}
        self._forms = [known for node in alternatives if (known := self._form(node))[1]]
        self.words = " or ".join(dict.fromkeys(words for _, words in self._forms))
        """What it takes: `one of full, selective, none`."""

    @property
    def is_switch(self) -> bool:
        """Whether it is true or false."""
        return "bool" in self._names

    @property
    def is_list(self) -> bool:
        """Whether it may hold several values."""
        return not self._names.isdisjoint(("List", "list", "Tuple"))

    def read(self, value: Any) -> Any:
        """The value as the field holds it; enums and dtypes as words. Raises ValueError when it does not fit."""
        if "None" in self._names and not isinstance(value, list) and value in NOTHING:
            return None
        parts = (value.split(",") if value else []) if isinstance(value, str) else value
        is_split = isinstance(value, str) and "," in value and not self._names.isdisjoint(("List", "Tuple"))
        word = value.removeprefix("torch.") if isinstance(value, str) and "dtype" in self._names else value
        for form, _ in self._forms:
            with contextlib.suppress(msgspec.ValidationError):
                is_many = is_split or get_origin(form) in (list, tuple)
                made = msgspec.convert(parts if is_many else word, form, strict=isinstance(value, int | float))
                if all(math.isfinite(one) for one in (made if isinstance(made, list) else [made]) if isinstance(one, float)):
                    return list(made) if isinstance(made, tuple) else DTYPES.get(made, made) if "dtype" in self._names else made
        raise ValueError(f"expected {self.words}")

    def _form(self, node: ast.expr) -> tuple[Any, str]:
        """What msgspec checks one of the alternatives against, and the same in words; none for an object."""
        name, inner, literal = _name(node), _arguments(node), Literal
        choices = tuple(map(ast.literal_eval, inner)) if name == "Literal" else self._choices.get(name)
        if choices:
            shown = "fp32, bf16, fp16, fp8" if name == "dtype" else ", ".join(map(str, choices))
            return literal[choices], f"one of {shown}"
        if name == "Tuple":
            return tuple[tuple(self._form(one)[0] for one in inner)], f"{len(inner)} values with commas between"  # type: ignore[misc]
        if name in ("List", "list") and inner:
            form, words = self._form(inner[0])
            return list[form], f"several with commas between, each {words}"  # type: ignore[valid-type]
        return PLAIN.get(name, (None, ""))


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
