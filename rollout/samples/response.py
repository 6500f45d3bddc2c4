"""What a sample is made from and what rewards see: a task, and the response made for it.

A session (session.py) turns a Task into Responses; a reward scores a Response. P prompt tokens and R response tokens become one sample of
T = P + R tokens.
"""

from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import numpy as np

from slimebus.bus.errors import SlimebusError
from slimebus.bus.messages import NO_VERSION, Scalar
from slimebus.bus.sample_table import LEAST_TEMPERATURE, MAX_REWARD, MAX_TEMPERATURE, MAX_TOKENS, MAX_VERSION, TOKEN_FIELDS
from slimebus.bus.samples import Sample

STATUS = {"stop": "completed", "length": "truncated", "abort": "aborted"}
GREEDY_BELOW = 1e-6
"""SGLang takes the likeliest token below this temperature, and reports logprobs of temperature 1."""
MAX_TEXT_CHARS = 4096
"""Of a session's name or one text in the metadata."""


class Task(msgspec.Struct, kw_only=True):
    """One sample to make. prompt: text or chat messages, as in the data; index: which of the group's n samples this is.

    session: requests with the same one go on from each other, so they are best served by one engine.
    """

    prompt: str | list[dict[str, Any]]
    prompt_ids: np.ndarray
    sampling: dict[str, Any]
    label: Any = None
    metadata: dict[str, Any] = {}
    group: str = ""
    dataset: str = ""
    index: int = 0
    session: str = ""


class EngineError(SlimebusError):
    """An engine answered, and not with what was asked for; the text names its URL."""

    code = "engine"


class Completion(NamedTuple):
    """One generated sequence of T tokens, the stop token included.

    output_ids    int32 [T]
    logprobs      float32 [T], of the distribution before top-k, top-p and min-p, at the sampling temperature
    finish_reason stop, length, or abort (what was generated until then is here)
    versions      (weight version, first token, one past the last token), in order, covering T
    """

    output_ids: np.ndarray
    logprobs: np.ndarray
    finish_reason: str
    versions: list[tuple[str, int, int]]


class Response(msgspec.Struct, kw_only=True):
    """One response to a task.

    token_ids int32 [R], logprobs float32 [R] under the policy that made them, versions: runs (version, length) over R
    (NO_VERSION for tokens no policy made), loss_mask uint8 [R] (None: all 1), text: of the last turn, without the end token,
    finish_reason: stop | length | abort. messages: the conversation, where it is one. `reward` is what a hook gave, if it gave one.

    prompt_ids int32 [P] and temperature are the task's when the response is made, copied: what becomes of the task does not change them.
    """

    task: Task
    token_ids: np.ndarray
    logprobs: np.ndarray
    versions: list[tuple[int, int]]
    text: str
    prompt_ids: np.ndarray | None = None
    temperature: float | None = None
    finish_reason: str = "stop"
    loss_mask: np.ndarray | None = None
    reward: float | None = None
    turn: int = 0
    session: str = ""
    messages: list[dict[str, Any]] = []
    metadata: dict[str, Scalar] = {}
    extras: dict[str, np.ndarray] = {}

    def __post_init__(self) -> None:
        if self.prompt_ids is None:
            self.prompt_ids = np.array(self.task.prompt_ids)
        if self.temperature is None:
            self.temperature = logprob_temperature(self.task.sampling)

    @property
    def prompt(self) -> str | list[dict[str, Any]]:
        """The task's prompt, as in the data."""
        return self.task.prompt

    @property
    def label(self) -> Any:
        """What the reward compares with."""
        return self.task.label


def logprob_temperature(sampling: dict[str, Any]) -> float:
    """The temperature of the logprobs that an engine reports under these sampling parameters: 1 for greedy ones."""
    temperature = float(sampling.get("temperature", 1.0))
    return 1.0 if temperature < GREEDY_BELOW else temperature


def to_sample(response: Response, *, failed: bool = False) -> Sample:
    """The trainable sequence: prompt tokens masked out, response tokens as the response says."""
    prompt, made = response.prompt_ids, response.token_ids
    assert prompt is not None  # __post_init__
    mask = np.ones(len(made), np.uint8) if response.loss_mask is None else response.loss_mask
    versions = [(NO_VERSION, len(prompt)), *response.versions] if len(prompt) else response.versions
    return Sample(
        tokens=np.concatenate([prompt, made]).astype(np.int32),
        loss_mask=np.concatenate([np.zeros(len(prompt), np.uint8), mask]).astype(np.uint8),
        rollout_logprobs=np.concatenate([np.zeros(len(prompt), np.float32), response.logprobs]).astype(np.float32),
        versions=versions,
        reward=None if failed else response.reward,
        temperature=1.0 if response.temperature is None else response.temperature,
        status="failed" if failed else STATUS[response.finish_reason],
        trajectory=response.task.index,
        session=response.session,
        turn=response.turn,
        metadata=response.metadata,
        extras=response.extras,
    )


# --- what a plug-in gave ---

Name = Annotated[str, msgspec.Meta(max_length=MAX_TEXT_CHARS)]
Run = tuple[Annotated[int, msgspec.Meta(ge=NO_VERSION, le=MAX_VERSION)], Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]]


class _Plain(msgspec.Struct):
    """The fields of a Response that are no arrays, as they may be sent."""

    versions: list[Run]
    text: str
    temperature: Annotated[float, msgspec.Meta(ge=LEAST_TEMPERATURE, le=MAX_TEMPERATURE)]
    finish_reason: Literal["stop", "length", "abort"]
    turn: Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]
    session: Name
    metadata: dict[Name, Name | Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | float | bool | None]


def normalise(response: Response, vocab_size: int | None) -> None:
    """Bring every field to its declared type. Raises an Exception that names one that cannot be brought there."""
    if not isinstance(response.task, Task) or not isinstance(response.task.index, int):
        raise ValueError(f"task is a {type(response.task).__name__}; expected the Task that the hook was given")
    response.prompt_ids = token_ids("prompt_ids", response.prompt_ids, vocab_size)
    response.token_ids = token_ids("token_ids", response.token_ids, vocab_size)
    num_tokens = len(response.token_ids)
    if num_tokens + len(response.prompt_ids) == 0:
        raise ValueError("prompt_ids and token_ids are both empty")
    response.logprobs = _array("logprobs", response.logprobs, "iuf", num_tokens).astype(np.float32)
    if not np.isfinite(response.logprobs).all():
        raise ValueError("logprobs has entries that are not finite")
    if response.loss_mask is not None:
        mask = _array("loss_mask", response.loss_mask, "iub", num_tokens)
        if num_tokens and not 0 <= int(mask.min()) <= int(mask.max()) <= 1:
            raise ValueError("loss_mask has entries other than 0 and 1")
        response.loss_mask = mask.astype(np.uint8)
    given = {name: plain(getattr(response, name)) for name in _Plain.__struct_fields__}
    given["versions"] = [tuple(map(plain, run)) for run in response.versions]
    given["metadata"] = {key: plain(value) for key, value in response.metadata.items()}
    sound = msgspec.convert(given, _Plain)
    msgspec.msgpack.encode(sound)  # raises for text that has no UTF-8
    for name in _Plain.__struct_fields__:
        setattr(response, name, getattr(sound, name))
    response.versions = [run for run in sound.versions if run[1]]
    if (covered := sum(length for _, length in response.versions)) != num_tokens:
        raise ValueError(f"versions cover {covered} of {num_tokens} token_ids")
    response.reward = None if response.reward is None else reward_number("reward", response.reward)
    if taken := sorted(TOKEN_FIELDS.keys() & response.extras.keys()):
        raise ValueError(f"extras has {taken[0]!r}, which every sample has already; give it another name")
    response.extras = {name: np.asarray(array) for name, array in response.extras.items()}


def plain(value: Any) -> Any:
    """A numpy or torch scalar as Python's own; anything else as it is."""
    return value.item() if hasattr(value, "item") and np.ndim(value) == 0 else value


def reward_number(name: str, value: Any) -> float:
    """A float from a number of any kind, within +-MAX_REWARD. Raises ValueError or TypeError."""
    if isinstance(value, str | bytes) or not hasattr(value, "__float__") or not abs(found := float(value)) <= MAX_REWARD:
        raise ValueError(f"{name} is {str(value)[:80]!r} (a {type(value).__name__}); expected a number within +-{MAX_REWARD:g}")
    return found


def _array(name: str, value: Any, kinds: str, length: int | None = None) -> np.ndarray:
    """One-dimensional, of a dtype of one of these numpy kinds."""
    array = np.asarray(value)
    if array.ndim == 1 and array.size == 0 and array.dtype.kind == "f":
        array = array.astype(np.int32)  # numpy takes [] for floats
    if array.ndim != 1 or array.dtype.kind not in kinds:
        raise ValueError(f"{name} is a {type(value).__name__}; expected a one-dimensional array of numbers")
    if length is not None and len(array) != length:
        raise ValueError(f"{name} has {len(array)} entries for {length} token_ids")
    return array


def token_ids(name: str, value: Any, vocab_size: int | None = None) -> np.ndarray:
    """int32 [T] from ids of any kind. Raises ValueError for what is no array of them, or not of the vocabulary."""
    ids = _array(name, value, "iu")
    limit = vocab_size or 1 << 31
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < limit:
        raise ValueError(f"{name} has token ids from {ids.min()} to {ids.max()}; expected 0 to {limit - 1}")
    return ids.astype(np.int32)
