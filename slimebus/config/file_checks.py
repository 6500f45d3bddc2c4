"""What a config names and this machine must have: prompt files, the model, hooks, keys, SGLang. A sentence for each that is missing."""

import contextlib
import gzip
import importlib.util
import itertools
import re
import subprocess
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from slimebus.bus.errors import ConfigError, DataError, HookError
from slimebus.config.convert import nearest
from slimebus.config.engine_plan import engine_specs
from slimebus.config.flags import trainer_command, trainer_options
from slimebus.config.load import Resolved
from slimebus.config.model_folder import context_length, read_config, tokenizer_differences, vocabulary_problems, weights_problems
from slimebus.config.schema import is_reward_spread
from slimebus.hooks import hooks
from slimebus.prompts.prompt_files import FileSpec, check_columns, parse
from slimebus.prompts.prompt_record import BYTE_ORDER_MARK, LineReader, PromptKeys
from slimebus.prompts.verifiers_tasks import is_tasks, load

TOKENIZERS = ("tokenizer.json", "tokenizer_config.json")
JSONL = (".jsonl", ".jsonl.gz")
UNLABELLED = ("random", "ifbench", "remote", "graded")
"""Built-in rewards that need no label."""
ENVIRONMENT = "rollout.environment"
TEACHER_FIELD = "teacher_logprobs"
ROWS_READ = 10_000
FIND_S = 60.0
LOOK = "import importlib.util, sys; sys.path.pop(0); found = importlib.util.find_spec(sys.argv[1]); print(found.origin if found else '')"
SGLANG_OPTION = re.compile(r"\"--([a-z][\w-]+)\"|^    ([a-z]\w+):", re.MULTILINE)
"""In the sources that declare arguments: one, or a field that is one."""
SGLANG_SOURCES = ("srt/server_args.py", "srt/arg_groups/**/*.py")


def file_problems(resolved: Resolved) -> list[str]:
    """Everything that a run on this machine lacks."""
    data, broker = resolved.config.data, resolved.config.broker
    looks = (_key_problems, _prompt_file_problems, label_problems, _layout_problems, _algorithm_problems)
    wanted = [("data.source_path", data.source_path, ""), ("broker.buffer_filter_path", broker.buffer_filter_path, "groups batch")]
    with ThreadPoolExecutor(1) as beside:
        external = beside.submit(external_problems, resolved)  # with options of Megatron's it waits seconds for a process that imports it
        found = [*(problem for look in looks for problem in look(resolved)), *_hook_problems(resolved, wanted), *worker_problems(resolved)]
        return [*found, *external.result()]


def trainer_problems(resolved: Resolved) -> list[str]:
    """What the trainer lacks, but for algorithms: they load torch, and the trainer joins the run before that."""
    return [*vocabulary_problems(resolved.model_dir), *_layout_problems(resolved)]


def worker_problems(resolved: Resolved) -> list[str]:
    """What a rollout worker lacks."""
    r = resolved.config.rollout
    keep = "" if is_reward_spread(r.dynamic_sampling_filter_path) else r.dynamic_sampling_filter_path
    wanted = [
        ("rollout.custom_rm_path", r.custom_rm_path, "response"),
        ("rollout.custom_generate_function_path", r.custom_generate_function_path, ""),
        ("rollout.dynamic_sampling_filter_path", keep, "samples"),
        ("rollout.hooks_path", r.hooks_path, ""),
        (ENVIRONMENT, r.environment, ""),
    ]
    wanted += [(f"eval.datasets.{name}.custom_rm_path", d.custom_rm_path, "response") for name, d in resolved.config.eval.datasets.items()]
    return [*_model_problems(resolved), *_hook_problems(resolved, wanted), *_engine_problems(resolved)]


def teacher_problems(resolved: Resolved, teacher: str) -> list[str]:
    """Why `rollout --teacher` cannot score this run: nothing waits for it, its engine cannot, or a model folder with another tokenizer."""
    config, found = resolved.config, []
    if TEACHER_FIELD not in config.broker.required_fields:
        found.append(f"broker.required_fields: {TEACHER_FIELD} is not among them; add it, so that every batch waits for the teacher")
    if config.rollout.rollout_temperature != 1:
        why = "engines score given tokens at temperature 1 only, and the student's logprobs are those of its own temperature"
        found.append(f"rollout.rollout_temperature: {config.rollout.rollout_temperature:g}, but {why}; set it to 1")
    others = [] if "://" in teacher else tokenizer_differences(resolved.model_dir, Path(teacher))
    return [*found, *(f"--teacher: {text}" for text in others)]


# --- prompts ---


def _file_specs(resolved: Resolved) -> Iterator[tuple[str, str, FileSpec]]:
    """(field, evaluation, file) of each entry that can be read; the evaluation is empty for data.prompt_data."""
    named = [("data.prompt_data", "", text) for text in resolved.config.data.prompt_data]
    named += [(f"eval.datasets.{name}.path", name, dataset.path) for name, dataset in resolved.config.eval.datasets.items()]
    for place, name, text in named:
        with contextlib.suppress(DataError):
            yield place, name, parse(str(resolved.path(text)))


def _prompt_file_problems(resolved: Resolved) -> Iterator[str]:
    data = resolved.config.data
    if not (data.prompt_data or data.source_path or data.wait_for_push):
        yield "data.prompt_data: no file given; name at least one file of prompts, a data.source_path, or set data.wait_for_push"
    for text in data.prompt_data:
        try:
            parse(str(resolved.path(text)))
        except DataError as bad:
            yield f"data.prompt_data: {bad.text}"
    for place, _, spec in _file_specs(resolved):
        if is_tasks(spec.path, resolved.config.rollout.environment):
            continue
        if not spec.path.is_file():
            yield f"{place}: no such file {spec.path}; expected jsonl (also .gz) or parquet"
            continue
        with contextlib.suppress(OSError, EOFError, ModuleNotFoundError):  # the broker tells what is wrong with a file
            try:
                if spec.start is not None or spec.stop is not None:
                    spec.rows_of(_num_rows(spec.path))
                if not data.skip_bad_prompts:
                    _check_first(spec, resolved.prompt_keys)
            except DataError as bad:
                yield f"{place}: {bad.text}"


def _check_first(spec: FileSpec, keys: PromptKeys) -> None:
    """Raise DataError where the file has no prompt, or the first of those used is none; the broker looks at all of them."""
    if not spec.path.name.endswith(JSONL):
        return check_columns(spec.path, keys)
    number, line = next(itertools.islice(_lines(spec.path), max(0, spec.start or 0), None), (0, b""))
    if not number:
        raise DataError(f"no prompts in {spec.path}; expected at least one line of JSON")
    try:
        LineReader(keys).record(line)
    except DataError as bad:
        raise DataError(f"{spec.path}:{number}: {bad.text}") from None


def _num_rows(path: Path) -> int:
    if not path.name.endswith(JSONL):
        from pyarrow.parquet import read_metadata

        return int(read_metadata(path).num_rows)
    return sum(1 for _ in _lines(path))


def label_problems(resolved: Resolved) -> Iterator[str]:
    """Jsonl files in which no row has the label that the built-in reward compares with; rows beyond the first 10,000 are not looked at."""
    r, data = resolved.config.rollout, resolved.config.data
    compares = not r.custom_rm_path and r.rm_type not in UNLABELLED and not r.custom_generate_function_path
    for place, name, spec in _file_specs(resolved):
        own, needs_label = resolved.config.eval.datasets.get(name), compares
        if own is not None and (own.custom_rm_path or own.rm_type):
            needs_label = not own.custom_rm_path and own.rm_type not in UNLABELLED
        if needs_label and spec.path.name.endswith(JSONL) and (keys := _keys_without_label(spec.path, resolved)):
            what = f"no row has the key {data.label_key!r} (data.label_key), which the reward compares with"
            remedy = "set data.label_key, or rollout.custom_rm_path for a reward that needs no label"
            yield f"{place}: {spec.path}: {what}; the first has {', '.join(map(repr, keys))}; {remedy}"


def _keys_without_label(path: Path, resolved: Resolved) -> list[str]:
    """The keys of the first row where no row has a label; nothing when one has, or when a row is malformed, which the broker tells."""
    data, first = resolved.config.data, list[str]()
    reader, lines = LineReader(resolved.prompt_keys), _lines(path)
    with contextlib.suppress(OSError, EOFError, DataError):
        for _, line in itertools.islice(lines, ROWS_READ):
            fields = reader.fields(line)
            if fields.get(data.label_key) is not None:
                return []
            first = first or list(fields)
        return [] if next(lines, None) else first
    return []


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Number and text of each line of a jsonl file that is not blank."""
    with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
        yield from ((number, line.removeprefix(BYTE_ORDER_MARK)) for number, line in enumerate(file, 1) if not line.isspace())


# --- the model and how it is spread ---


def _model_problems(resolved: Resolved) -> Iterator[str]:
    try:
        model = resolved.model_dir
    except ConfigError as bad:
        yield bad.text
        return
    if not any((model / name).is_file() for name in TOKENIZERS):
        yield f"model.hf_checkpoint: {model}: no tokenizer ({' or '.join(TOKENIZERS)}); expected a Hugging Face directory with one"
    if not any(model.glob("*.safetensors")):
        yield f"model.hf_checkpoint: {model}: no weights (*.safetensors); expected a Hugging Face directory with them"
    yield from vocabulary_problems(model)
    yield from (f"model.hf_checkpoint: {problem}" for problem in weights_problems(model))
    with contextlib.suppress(ConfigError):  # told already
        yield from _prompt_length_problems(resolved, context_length(model))


def _prompt_length_problems(resolved: Resolved, context: int) -> Iterator[str]:
    config = resolved.config
    lengths = {"rollout.rollout_max_response_len": config.rollout.rollout_max_response_len}
    lengths |= {f"eval.datasets.{name}.max_response_len": dataset.max_response_len for name, dataset in config.eval.datasets.items()}
    for field, length in lengths.items():
        if 0 < context <= length:
            yield f"{field}: {length} tokens leave no room for a prompt in the model's context of {context} (max_position_embeddings)"


def _layout_problems(resolved: Resolved) -> Iterator[str]:
    """Ranks that cannot share the model's heads or layers as Megatron would."""
    try:
        tree = read_config(resolved.model_dir)
    except ConfigError:
        return
    shape, t = tree.get("text_config") or tree, resolved.config.trainer
    tensor, pipeline = t.tensor_model_parallel_size, t.pipeline_model_parallel_size
    heads, layers = shape.get("num_attention_heads") or tensor, shape.get("num_hidden_layers") or pipeline
    groups = shape.get("num_key_value_heads") or heads
    cannot = f"trainer.tensor_model_parallel_size: {tensor} ranks cannot share the model's"
    if heads % tensor:
        yield f"{cannot} {heads} attention heads; expected a divisor of them"
    elif groups % tensor and tensor % groups:
        yield f"{cannot} {groups} key-value heads; expected a divisor or a multiple of them"
    if layers % pipeline and not any("pipeline" in name for name in resolved.config.megatron):
        yield f"trainer.pipeline_model_parallel_size: {pipeline} ranks cannot share the model's {layers} layers; expected a divisor of them"


def external_problems(resolved: Resolved) -> Sequence[str]:
    """What the trainer finds wrong with the model and with `megatron`."""
    options = trainer_options()
    return options.problems(resolved) if options is not None else ()


def can_check_algorithms() -> bool:
    """Whether the trainer and torch, with which algorithms are written, are installed here."""
    return trainer_command() is not None and importlib.util.find_spec("torch") is not None


def unchecked(resolved: Resolved) -> Iterator[str]:
    """A sentence for each section that this machine cannot check."""
    if not can_check_algorithms():
        yield "section algorithm: its plug-ins were not checked, as torch or the trainer is not installed here"
    if resolved.config.megatron and (trainer_command() is None or importlib.util.find_spec("megatron") is None):
        yield "section megatron: its options were not checked, as megatron-core or the trainer is not installed here"


def _algorithm_problems(resolved: Resolved) -> list[str]:
    command = trainer_command() if can_check_algorithms() else None
    return command.problems(resolved) if command is not None and command.problems is not None else []


def _unknown_name_problems(resolved: Resolved, section: str, known: Collection[str], what: str) -> Iterator[str]:
    for name in getattr(resolved.config, section) if known else ():
        if name.lstrip("-").replace("-", "_") not in known:
            place = resolved.origin.get(f"{section}.{name}", "config")
            yield f"{place}: {section}.{name}: no {what}{nearest(name, sorted(known))}"


# --- keys, hooks, engine ---


def _key_problems(resolved: Resolved) -> Iterator[str]:
    if (place := resolved.keys_path) is not None and not place.exists():
        yield f"security.keys: no folder or key file at {place}; `slimebus keys init` makes a folder on the broker's machine"


def _hook_problems(resolved: Resolved, wanted: Iterable[tuple[str, str, str]]) -> Iterator[str]:
    """wanted: field, import path (empty: none), and the arguments by position."""
    for field, path, arguments in wanted:
        try:
            if path and field == ENVIRONMENT:
                load(path, resolved.base)
            elif path:
                hooks.load(path, base=resolved.base, arguments=arguments.split())
        except (HookError, ConfigError) as bad:
            yield f"{field}: {bad.text}"


def _engine_problems(resolved: Resolved) -> Iterator[str]:
    engine = resolved.config.engine
    if engine.use_router:
        if (package := _package_folder(engine.engine_python, "sglang_router")) is None:
            yield f"engine.use_router: true, but {engine.engine_python or sys.executable} has no package sglang-router; install it there"
        else:
            yield from _unknown_name_problems(
                resolved, "router", _declared_arguments(package, ("router_args.py",)), "argument of sglang-router"
            )
    specs = []
    if not engine.engine_url and engine.engine != "none":
        try:
            specs = engine_specs(resolved.config, resolved.path(resolved.config.model.hf_checkpoint), resolved.base)
        except ConfigError as bad:
            yield bad.text
        missing = (s.directory for s in specs if s.is_frozen and not (s.directory / "config.json").is_file())
        yield from (f"engine.sglang_config: no model at {directory}" for directory in missing)
    if engine.engine != "sglang" or engine.engine_url:
        return
    remedy = "bin/install-sglang installs it into .venv-sglang; give engine.engine_python: .venv-sglang/bin/python"
    python = engine.engine_python
    if python and not Path(python).is_file():
        yield f"engine.engine_python: no such file {python}; {remedy}"
    elif (package := _sglang_folder(python)) is None:
        yield f"engine.engine: sglang, but {python or sys.executable} has no package sglang; {remedy}"
    else:
        known = _declared_arguments(package, SGLANG_SOURCES)
        yield from _unknown_name_problems(resolved, "sglang", known, "argument of the SGLang server")
        for name in {name for spec in specs for name in spec.arguments} - resolved.config.sglang.keys() if known else ():
            if name.replace("-", "_") not in known:
                yield f"engine.sglang_config: {name}: no argument of the SGLang server{nearest(name, sorted(known))}"


def _declared_arguments(package: Path, sources: Iterable[str]) -> set[str]:
    """The names of what a package declares as arguments; none for a release that keeps them elsewhere."""
    texts = [file.read_text() for source in sources for file in package.glob(source)]
    return {name.replace("-", "_") for text in texts for option in SGLANG_OPTION.findall(text) for name in option if name}


def _sglang_folder(python: str) -> Path | None:
    return _package_folder(python, "sglang")


def _package_folder(python: str, name: str) -> Path | None:
    """The folder of a package that this Python has; None without one."""
    if not python:
        spec = importlib.util.find_spec(name)
        return Path(spec.origin).parent if spec is not None and spec.origin else None
    try:
        done = subprocess.run([python, "-c", LOOK, name], check=False, timeout=FIND_S, capture_output=True, text=True)
        return Path(done.stdout.strip()).parent if done.stdout.strip() else None
    except (OSError, subprocess.TimeoutExpired):
        return None
