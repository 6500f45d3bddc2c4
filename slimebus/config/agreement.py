"""The settings that the processes of a run must agree on: each says its own with its hello, and the broker compares."""

import operator
from pathlib import Path

import msgspec
import xxhash

from slimebus.bus.errors import SlimebusError
from slimebus.config.load import Resolved
from slimebus.config.model_folder import TOKENIZER, read_config

SAMPLING = ("temperature", "top_p", "top_k", "max_response_len", "max_prompt_len", "max_context_len", "stop", "stop_token_ids")
REWARD = (
    *("rollout.rm_type", "rollout.custom_rm_path", "rollout.reward_key", "rollout.custom_generate_function_path"),
    *("data.apply_chat_template", "data.apply_chat_template_kwargs"),
    *("rollout.sampling_params", "rollout.mask_offpolicy_in_partial_rollout"),
)
MODEL = "model.hf_checkpoint"
COMPARED = {
    "rollout": ("name", "rollout.n_samples_per_prompt", *(f"rollout.rollout_{name}" for name in SAMPLING), *REWARD),
    "trainer": (
        *("name", "rollout.num_rollout", "rollout.rollout_batch_size", "rollout.n_samples_per_prompt"),
        *("weights.update_weights_interval", "rollout.rollout_temperature"),
    ),
}
MAX_CHARS = 200
WITHOUT = ("transformers_version", "_name_or_path", "torch_dtype", "dtype", "architectures")
"""Of config.json: what differs between copies of one model."""


def settings_of(resolved: Resolved, role: str) -> dict[str, str]:
    """What a process of this role says with its hello, name -> JSON; broker: all that it compares, but no model, which it may lack."""
    names = COMPARED.get(role) or dict.fromkeys(name for of_role in COMPARED.values() for name in of_role)
    said = {name: _text(resolved, name) for name in names}
    return said | {MODEL: model_hash(resolved)} if role in COMPARED else said


def _text(resolved: Resolved, name: str) -> str:
    return shortened(msgspec.json.encode(operator.attrgetter(name)(resolved.config)).decode())


def shortened(text: str) -> str:
    """The text; of a long one its beginning, and a hash of it all."""
    return text if len(text) <= MAX_CHARS else f"{text[:MAX_CHARS]}... {xxhash.xxh3_64_hexdigest(text.encode())}"


def model_hash(resolved: Resolved) -> str:
    """Of what samples mean: the model's shape and its tokenizer; empty where there is no model to read."""
    try:
        return folder_hash(resolved.model_dir)
    except SlimebusError:
        return ""


def folder_hash(folder: Path) -> str:
    """The same of a model folder."""
    try:
        tree, tokenizer = read_config(folder), folder / TOKENIZER
        digest = xxhash.xxh3_64(msgspec.json.encode({k: tree[k] for k in sorted(tree) if k not in WITHOUT}))
        digest.update(tokenizer.read_bytes() if tokenizer.is_file() else b"")
    except (SlimebusError, OSError):
        return ""
    return digest.hexdigest()[:8]
