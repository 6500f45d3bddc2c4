"""The stand-ins of te_compat keep the contract of megatron-core's Transformer Engine classes, as far as their source says it."""

import ast
import inspect
from functools import cache
from pathlib import Path
from typing import Any

import megatron.core
import pytest
from megatron.core.tensor_parallel import layers
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

from trainer.compat import te_compat
from trainer.compat.attention import PackedAttention, rotate_packed
from trainer.compat.te_compat import RMSNorm

CORE = Path(str(megatron.core.__file__)).parent
TE, PROVIDER = CORE / "extensions" / "transformer_engine.py", CORE / "extensions" / "transformer_engine_spec_provider.py"
STAND_INS: dict[str, Any] = {
    "TENorm": RMSNorm,
    "TELinear": te_compat.Linear,
    "TEColumnParallelLinear": te_compat.ColumnLinear,
    "TERowParallelLinear": te_compat.RowLinear,
    "TELayerNormColumnParallelLinear": te_compat.LayerNormColumn,
    "TEDotProductAttention": PackedAttention,
    "TEColumnParallelGroupedLinear": te_compat.Grouped,
    "TERowParallelGroupedLinear": te_compat.GroupedRow,
}


@cache
def nodes(file: Path) -> dict[str, Any]:
    """Every class and function of a module by its name, a method as Class.name."""
    found = {}
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ClassDef):
            found |= {node.name: node} | {f"{node.name}.{one.name}": one for one in node.body if isinstance(one, ast.FunctionDef)}
        elif isinstance(node, ast.FunctionDef):
            found.setdefault(node.name, node)
    return found


def named(function: ast.FunctionDef) -> list[str]:
    arguments = [*function.args.args, *function.args.kwonlyargs]
    return [argument.arg for argument in arguments if argument.arg not in ("self", "cls")]


def takes(kind: type) -> set[str] | None:
    """The names of options that a class can be made with; None: any."""
    names = set[str]()
    for one in kind.__mro__:
        if "__init__" in vars(one) and one not in (object,):
            parameters = inspect.signature(one.__init__).parameters.values()
            names |= {parameter.name for parameter in parameters}
            rest = [parameter.name for parameter in parameters if parameter.kind is inspect.Parameter.VAR_KEYWORD]
            if rest == ["unused"]:
                return None
            if not rest:
                return names
    return names


@pytest.mark.parametrize("name", STAND_INS)
def test_a_stand_in_is_made_with_what_transformer_engines_is_made_with(name: str) -> None:
    given = nodes(TE).get(f"{name}.__init__") or nodes(TE)[f"{name}.__new__"]
    known = takes(STAND_INS[name])
    assert known is None or set(named(given)) <= known
    required = [p.name for p in inspect.signature(STAND_INS[name].__init__).parameters.values() if p.default is p.empty and p.kind == 3]
    assert set(required) <= set(named(given)), "it asks for what megatron does not give"


@pytest.mark.parametrize(
    ("name", "owner"),
    [
        ("TELinear", "TELinear"),
        ("TEColumnParallelLinear", "TELinear"),
        ("TERowParallelLinear", "TELinear"),
        ("TELayerNormColumnParallelLinear", "TELayerNormColumnParallelLinear"),
        ("TEColumnParallelGroupedLinear", "TEGroupedLinear"),
        ("TERowParallelGroupedLinear", "TEGroupedLinear"),
        ("TEDotProductAttention", "TEDotProductAttention"),
    ],
)
def test_a_stand_in_is_called_as_transformer_engines(name: str, owner: str) -> None:
    forward = nodes(TE)[f"{owner}.forward"].args
    positional = [argument.arg for argument in forward.args[1 : len(forward.args) - len(forward.defaults)]]
    optional = {argument.arg: None for argument in forward.args[len(forward.args) - len(forward.defaults) :]}
    inspect.signature(STAND_INS[name].forward).bind(None, *positional, **optional)


def axes(function: ast.FunctionDef) -> dict[str, int]:
    """`weight` and `bias` -> the axis that tensor parallelism cuts, as a dictionary in the function says it."""
    for node in ast.walk(function):
        if isinstance(node, ast.Dict | ast.DictComp):
            found = {}
            for key, value in zip(node.keys, node.values, strict=True) if isinstance(node, ast.Dict) else ():
                text = "".join(part.value for part in getattr(key, "values", [key]) if isinstance(part, ast.Constant))
                if isinstance(value, ast.Constant):
                    found[text.lstrip(".")] = value.value
            if found:
                return found
    return {}


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("TEColumnParallelLinear", ColumnParallelLinear),
        ("TERowParallelLinear", RowParallelLinear),
        ("TELayerNormColumnParallelLinear", ColumnParallelLinear),
    ],
)
def test_checkpoints_are_cut_along_the_same_axes(name: str, ours: type) -> None:
    source = axes(nodes(TE)[f"{name}.sharded_state_dict"])
    assert source["weight"] == axes(nodes(Path(layers.__file__))[f"{ours.__name__}.sharded_state_dict"])["weight"]
    assert issubclass(STAND_INS[name], ours)
    assert STAND_INS[name].sharded_state_dict is ours.sharded_state_dict


@pytest.mark.parametrize(("name", "kind"), [("TEColumnParallelGroupedLinear", "Column"), ("TERowParallelGroupedLinear", "Row")])
def test_experts_are_cut_along_the_same_axis(name: str, kind: str) -> None:
    body = ast.unparse(nodes(TE)[f"{name}.sharded_state_dict"])
    assert f"f'{{gemm_idx}}.weight': {STAND_INS[name].axis}" in body, kind


def test_weights_have_transformer_engines_names() -> None:
    """Those that our weight map and every checkpoint are written for."""
    grouped = ast.unparse(nodes(TE)["TEGroupedLinear._sharded_state_dict_grouped"])
    assert "f'weight{gemm_idx}'" in grouped
    assert "f'{prefix}weight{gemm_idx}'" in grouped
    assert ".layer_norm_weight" in ast.unparse(nodes(TE)["split_te_layernorm_column_parallel_linear"])
    assert 'register_parameter(f"weight{index}"' in inspect.getsource(te_compat.Grouped)
    assert "self.layer_norm_weight = " in inspect.getsource(te_compat.LayerNormColumn)


def test_the_provider_answers_whatever_megatron_asks_it() -> None:
    asked = {one.name: one for one in nodes(PROVIDER)["TESpecProvider"].body if isinstance(one, ast.FunctionDef)}
    provider: Any = te_compat.Provider()
    assert asked.keys() == {name for name in vars(te_compat.Provider) if not name.startswith("_")}
    for name, function in asked.items():
        arguments = named(function)
        answer = getattr(provider, name)(*[True, False][: len(arguments)])
        returned = [node.value for node in ast.walk(function) if isinstance(node, ast.Return)]
        classes = {STAND_INS[node.id] for node in returned if isinstance(node, ast.Name) and node.id in STAND_INS}
        if classes:
            assert classes == {answer}
    _, grouped = provider.grouped_mlp_modules(True, False)
    assert (grouped.linear_fc1, grouped.linear_fc2) == (te_compat.Grouped, te_compat.GroupedRow)


def test_the_rotary_embedding_is_called_as_transformer_engines() -> None:
    arguments = nodes(TE)["fused_apply_rotary_pos_emb_thd"].args
    positional = [argument.arg for argument in arguments.args[: len(arguments.args) - len(arguments.defaults)]]
    optional = dict.fromkeys(argument.arg for argument in arguments.args[len(positional) :])
    inspect.signature(rotate_packed).bind(*positional, **optional)
