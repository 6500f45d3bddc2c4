"""The settings that the processes of a run must agree on: each says its own with its hello, and the broker compares."""

import operator
from pathlib import Path

import msgspec
import xxhash

from slimebus.bus.errors import SlimebusError
from slimebus.config.load import Resolved
from slimebus.config.model_folder import TOKENIZER, read_config
from slimebus.config.schema import paths

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
HOOKS = (
    *(f"rollout.{name}" for name in ("custom_rm_path", "custom_generate_function_path", "dynamic_sampling_filter_path", "hooks_path")),
    *("rollout.environment", "data.source_path", "broker.buffer_filter_path"),
)
MEANING = (
    *(MODEL, "rollout.rm_type", "rollout.custom_rm_path", "rollout.reward_key", "rollout.custom_generate_function_path"),
    *("rollout.environment", "data.apply_chat_template", "data.apply_chat_template_kwargs"),
)
"""With another one of these, the samples before and after a restart do not mean the same."""
OF_TRAINER = ("num_rollout", "rollout_batch_size", "n_samples_per_prompt", "num_steps_per_rollout", "num_passes_per_rollout")
OF_SAMPLING = ("temperature", "top_p", "top_k", "max_response_len")
"""Of `rollout`, the latter behind `rollout_`: a trainer compares these with those of its last start."""
NOT_RECORDED = (
    *("data.prompt_data", "data.wait_for_push", "data.skip_bad_prompts", "rollout.max_running_groups"),
    *(f"rollout.{name}" for name in OF_TRAINER),
    *(f"rollout.rollout_{name}" for name in OF_SAMPLING),
)
SAMPLED_BYTES = 1 << 20
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


def recorded_settings(resolved: Resolved) -> dict[str, str]:
    """What a run's samples and evaluations rest on, name -> text, with hashes of the files that it names and this machine has.

    Not the prompts, as the store has their fingerprint, nor what the trainer compares with its own last start.
    """
    config, base = resolved.config, resolved.base
    names = [name for name in paths() if name.startswith(("data.", "rollout.")) and not name.endswith("_s") and name not in NOT_RECORDED]
    found = {name: operator.attrgetter(name)(config) for name in [*names, *HOOKS, "rollout.sampling_params"]}
    found |= {name: hook_text(found[name], base) for name in HOOKS}
    for name, dataset in config.eval.datasets.items():
        own = {"custom_rm_path": hook_text(dataset.custom_rm_path, base), "file": _file_hash(resolved.path(dataset.path))}
        about = msgspec.to_builtins(dataset) | own
        found[f"eval.datasets.{name}"] = {key: value for key, value in about.items() if key != "path" or not own["file"]}
    texts = {name: shortened(value if isinstance(value, str) else msgspec.json.encode(value).decode()) for name, value in found.items()}
    return texts | ({MODEL: f"hash {shape}-{weights_hash(resolved.model_dir)}"} if (shape := model_hash(resolved)) else {})


def hook_text(name: str, base: Path | None) -> str:
    """An import path as it is; of `path/own.py:name` the file's name and a hash of its bytes."""
    path, colon, what = name.rpartition(":")
    file = (base or Path()) / path
    return f"{file.name}:{what} (hash {_file_hash(file)})" if colon and path.endswith(".py") and file.is_file() else name


def _file_hash(file: Path) -> str:
    return xxhash.xxh3_64_hexdigest(file.read_bytes())[:8] if file.is_file() else ""


def weights_hash(folder: Path) -> str:
    """Of a model's weights: sizes, beginnings (the header) and ends of its files, which no two trained models have in common."""
    digest = xxhash.xxh3_64()
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        with path.open("rb") as file:
            digest.update(b"%d" % size + file.read(SAMPLED_BYTES))
            file.seek(max(0, size - SAMPLED_BYTES))
            digest.update(file.read())
    return digest.hexdigest()[:8]


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
