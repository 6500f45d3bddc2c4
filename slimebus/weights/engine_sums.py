"""What an engine says of its weights, and the same computed of the trainer's: `/weights_checker`, name by name.

An engine that keeps Hugging Face's tensors answers xxh3_128, 32 hex digits. SGLang answers 16 hex digits for each of its own parameters,
which it has put together of several tensors:

    qkv_proj     = q_proj, k_proj, v_proj      rows below rows
    gate_up_proj = gate_proj, up_proj          the same
    experts.w13_weight = gate_proj, up_proj of expert 0, of expert 1, ...
    experts.w2_weight = down_proj of expert 0, of expert 1, ...
    embed_tokens, lm_head                      rows of zeros below, up to a multiple of 64
"""

import hashlib
import itertools
import json
import re
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slimebus.errors import SlimebusError, Unreachable
from slimebus.weights.gpu_sum import gpu_sum
from slimebus.weights.rounding import rounded
from slimebus.weights.tensors import Tensor, Weights

PARTS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
EXPERT_PARTS = {"w13_weight": ("gate_proj", "up_proj"), "w2_weight": ("down_proj",)}
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
VOCABULARY_ROWS = 64
XXH3_DIGITS = 32
TRIES = 3


@dataclass(frozen=True)
class EngineSums:
    """sums: by the engine's own names. device: SGLang hashes in another way on `cuda`. num_ranks: that have different parts."""

    url: str
    version: str
    sums: Mapping[str, str]
    device: str
    num_ranks: int


@dataclass(frozen=True)
class Verdict:
    """same, different: names of tensors. uncompared: a name, and why it could not be compared. held_as: dtypes of what is the same."""

    same: list[str]
    different: list[str]
    uncompared: dict[str, str]
    held_as: tuple[str, ...] = ()

    @property
    def is_same(self) -> bool:
        """Every tensor of both sides was compared, and none differs."""
        return bool(self.same) and not self.different and not self.uncompared


def version_of(url: str, timeout_s: float) -> str:
    """What an engine says its weights are. Its HTTP server alone answers this, whatever the model is busy with. Raises Unreachable."""
    return str(_ask(url.rstrip("/"), "/model_info", None, timeout_s).get("weight_version", ""))


def sums_of(url: str, timeout_s: float) -> EngineSums:
    """Ask an engine. Raises Unreachable, or SlimebusError when it has no checksums to give, or none of one version."""
    url = url.rstrip("/")
    about = _ask(url, "/server_info", None, timeout_s)
    for _ in range(TRIES):
        version, ranks = version_of(url, timeout_s), _ranks(url, timeout_s)
        if version_of(url, timeout_s) == version:
            num_parts = len({tuple(sorted(sums.items())) for sums in ranks})  # replicas all have the same
            return EngineSums(url, version, ranks[0], str(about.get("device") or "cpu"), num_parts)
    raise SlimebusError(f"engine {url} was updated each of the {TRIES} times that it was asked", code="engine", retryable=True)


def _ranks(url: str, timeout_s: float) -> list[dict[str, str]]:
    reply = _ask(url, "/weights_checker", {"action": "checksum"}, timeout_s)
    ranks: list[Any] = [rank.get("checksums") for rank in reply.get("ranks") or [] if isinstance(rank, dict)]
    if not ranks or not all(isinstance(sums, dict) and sums for sums in ranks):
        raise SlimebusError(f"engine {url}: /weights_checker answered without checksums: {str(reply)[:200]}", code="engine")
    return ranks


def _ask(url: str, path: str, body: dict[str, Any] | None, timeout_s: float) -> dict[str, Any]:
    data = None if body is None else json.dumps(body).encode()
    try:
        request = urllib.request.Request(url + path, data=data, headers={"Content-Type": "application/json"})
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # as a worker asks it, whatever the environment says
        with direct.open(request, timeout=timeout_s) as answer:
            found = json.loads(answer.read())
    except urllib.error.HTTPError as refused:
        text = refused.read()[:300].decode(errors="replace").strip() or "is this an engine, and no router?"
        raise SlimebusError(f"engine {url}: {path} answered {refused.code}: {text}", code="engine") from None
    except (OSError, ValueError) as bad:
        raise Unreachable(
            f"engine {url} did not answer {path}: {getattr(bad, 'reason', bad)}; is its address right, as http://HOST:PORT?"
        ) from None
    if not isinstance(found, dict):
        raise SlimebusError(f"engine {url}: the answer to {path} is not a JSON object", code="engine")
    return found


def compare(engine: EngineSums, weights: Weights) -> Verdict:
    """Every tensor of the version against what the engine has, and the other way round."""
    if all(len(found) == XXH3_DIGITS for found in engine.sums.values()):
        return _by_hash(engine.sums, weights)
    if engine.num_ranks > 1:
        return Verdict([], [], dict.fromkeys(sorted(weights.tensors), f"the engine splits it over {engine.num_ranks} ranks"))
    return _by_parameter(engine, weights)


def _by_hash(sums: Mapping[str, str], weights: Weights) -> Verdict:
    both = sorted(sums.keys() & weights.hashes.keys())
    different = [name for name in both if sums[name] != weights.hashes[name]]
    lacking = _lacking(weights.hashes.keys() - sums.keys(), sums.keys() - weights.hashes.keys(), weights)
    return Verdict([name for name in both if name not in different], different, lacking)


def _by_parameter(engine: EngineSums, weights: Weights) -> Verdict:
    same, different = list[str](), list[str]()
    used, unknown, held_as, reordered = set[str](), set[str](), set[str](), dict[str, str]()
    for name, found in sorted(engine.sums.items()):
        parts = parts_of(name, weights.tensors)
        if not parts:
            unknown.add(name)
            continue
        used.update(parts)
        dtype = _held_as(name, [weights.tensors[part] for part in parts], found, sum_on(engine.device))
        if not dtype and engine.device != "cpu" and _experts(name):
            reordered |= dict.fromkeys(parts, f"it differs, or the engine keeps {name} in an order of its kernels")
        else:
            (same if dtype else different).extend(parts)
        held_as.update([dtype] if dtype else [])
    lacking = _lacking(weights.tensors.keys() - used, unknown, weights)
    return Verdict(sorted(set(same)), sorted(set(different)), dict(sorted((lacking | reordered).items())), tuple(sorted(held_as)))


def _lacking(of_trainer: set[str], of_engine: set[str], weights: Weights) -> dict[str, str]:
    """Why names that only one side has were not compared. A head that is the embedding again was compared with it."""
    tied = {HEAD} if weights.hashes.get(HEAD) == weights.hashes.get(EMBEDDING) else set()
    found = dict.fromkeys(sorted(of_trainer - tied), "the engine has no parameter for it")
    return found | dict.fromkeys(sorted(of_engine), "the trainer publishes nothing for it")


def parts_of(name: str, tensors: Mapping[str, Tensor]) -> list[str]:
    """The tensors that a parameter of SGLang is made of, in order; empty when it is made in a way that is not known here."""
    match = re.search(r"\b(qkv_proj|gate_up_proj)\b", name)
    wanted = [name.replace(match[1], part) for part in PARTS[match[1]]] if match else [name]
    if name == HEAD and name not in tensors:
        wanted = [EMBEDDING]
    if experts := _experts(name):
        of_each = ([f"{experts[1]}{number}.{part}.weight" for part in EXPERT_PARTS[experts[2]]] for number in itertools.count())
        wanted = [part for parts in itertools.takewhile(lambda parts: parts[0] in tensors, of_each) for part in parts]
    return wanted if all(part in tensors for part in wanted) else []


def _experts(name: str) -> re.Match[str] | None:
    return re.fullmatch(r"(.*\.experts\.)(w13_weight|w2_weight)", name)


def _held_as(name: str, tensors: list[Tensor], found: str, sum_: Callable[[NDArray[np.uint8]], str]) -> str:
    """The dtype in which the engine has these tensors with this checksum; "" when it has something else."""
    return next((dtype for dtype, form in _forms(name, tensors) if sum_(form) == found), "")


def _forms(name: str, tensors: list[Tensor]) -> Iterator[tuple[str, NDArray[np.uint8]]]:
    """What the engine may hold: the bytes as published, or as its own dtype; with rows of zeros below a vocabulary."""
    plain = np.concatenate([tensor.buffer for tensor in tensors])
    rows = tensors[0].shape[0] if tensors[0].shape else 0
    for dtype, form in _dtypes(tensors[0].dtype, plain):
        yield dtype, form
        if name in (HEAD, EMBEDDING) and rows % VOCABULARY_ROWS:
            yield dtype, np.concatenate([form, np.zeros(len(form) // rows * (-rows % VOCABULARY_ROWS), np.uint8)])


def _dtypes(dtype: str, plain: NDArray[np.uint8]) -> Iterator[tuple[str, NDArray[np.uint8]]]:
    yield dtype, plain
    if dtype not in ("bfloat16", "float32"):
        return
    wide = plain.view(np.float32) if dtype == "float32" else (plain.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    if dtype == "float32":
        yield "bfloat16", rounded(Tensor(dtype, wide.shape, plain)).buffer
    else:
        yield "float32", wide.view(np.uint8)
    with np.errstate(over="ignore"):
        yield "float16", wide.astype(np.float16).view(np.uint8)


def sum_on(device: str) -> Callable[[NDArray[np.uint8]], str]:
    """How SGLang's weight checker sums up the bytes of a parameter there."""
    return gpu_sum if device == "cuda" else lambda form: hashlib.sha256(form.data).hexdigest()[:16]
