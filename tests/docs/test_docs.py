"""The documents say what is there: commands, options, fields, files, links, codes, packages."""

import ast
import functools
import os
import re
import textwrap
import tomllib
from collections.abc import Iterator
from itertools import dropwhile
from pathlib import Path
from typing import Any

import click
import pytest
from command_tree import leaves

from slimebus.cli.root import root
from slimebus.config.flags import ConfigCommand
from slimebus.config.schema import OPEN_MAPS, SECTIONS, EvalDataset, fields_of, paths, sections

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "configs").glob("*/README.md")])
CODE_LINE = re.compile(r"^(?: {4,}\S.*)$", re.MULTILINE)
FENCE = re.compile(r"^```[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"(?<!\\)\[[^\]]*\]\(([^)\s]+)\)")
REPOSITORY_PATH = re.compile(r"^(?:slimebus|broker|rollout|trainer|configs|docs|tests|bin)/[\w./*-]+(?::\w+)?$")
FILE_SUFFIXES = ("py", "md", "yaml", "jsonl", "json", "png", "txt", "toml", "safetensors")

each_document = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: str(d.relative_to(ROOT)))


def read(name: str) -> str:
    return (ROOT / name).read_text()


def spans(text: str) -> list[str]:
    return SPAN.findall(FENCE.sub("", text))


def code(text: str) -> Iterator[str]:
    """Every piece that is set as code: lines of fences, indented lines, spans; a line that ends in a backslash goes on."""
    joined = text.replace("\\\n", " ")
    for fence in FENCE.findall(joined):
        yield from fence.splitlines()
    yield from CODE_LINE.findall(FENCE.sub("", joined))
    yield from spans(joined)


def command_lines(text: str, program: str) -> list[list[str]]:
    """The words that follow `program` in each command of the document; comments and VARIABLE=value in front are left out."""
    found = []
    for line in code(text):
        for command in re.split(r"&&|[;&|]|\bdo\b", line.partition(" #")[0]):
            words = list(dropwhile(lambda word: "=" in word, command.split()))
            if words and words[0] == program:
                found.append(words[1:])
    return found


COMMANDS = dict(leaves(root))


def options(command: click.Command) -> set[str]:
    """Every option as it may be written."""
    return {word for p in command.params if isinstance(p, click.Option) for word in (*p.opts, *p.secondary_opts)} | {"--help", "-h"}


def own_options(command: click.Command) -> set[str]:
    """The long options that are not config fields."""
    return {p.opts[0] for p in command.params if isinstance(p, click.Option) and not p.hidden}


def problem_of(words: list[str]) -> str:
    """What is wrong with `slimebus WORDS`; empty when it would be parsed."""
    command: click.Command = root
    rest = list(words)
    while isinstance(command, click.Group):
        while rest and rest[0].startswith("-"):
            if rest[0].partition("=")[0] not in options(command):
                return f"no option {rest[0]}"
            rest.pop(0)
        if not rest or not re.fullmatch(r"[a-z]+", rest[0]):
            return ""
        name = rest.pop(0)
        found = command.get_command(click.Context(command), name)
        if found is None:
            return f"no command {name!r}"
        command = found
    for word in rest:
        option = word.partition("=")[0]
        if word.startswith("-") and word != "-" and option not in options(command) and not is_external(command, option):
            return f"no option {option}"
    return ""


def is_external(command: click.Command, option: str) -> bool:
    """Whether it is an option of another project; one that may be Megatron's is asked of Megatron's classes."""
    found = command.external_option(option, is_alone=True) if isinstance(command, ConfigCommand) else None
    return found is not None and (not found.name.startswith("megatron.") or found.name.removeprefix("megatron.") in megatron_names())


@functools.cache
def megatron_names() -> set[str]:
    """Every name under `megatron`, and what --no-NAME leaves of those that begin with no."""
    from trainer.compat.cpu_compat import import_megatron

    import_megatron()
    from trainer.arguments.megatron_options import options, spellings

    names = {*options(), *spellings()}
    return names | {name.removeprefix("no_") for name in names}


# --- commands ---


@each_document
def test_every_command_line_would_be_parsed(document: Path) -> None:
    problems = {" ".join(words): problem_of(words) for words in command_lines(document.read_text(), "slimebus")}
    assert not {line: problem for line, problem in problems.items() if problem}


def test_command_lines_are_found_and_wrong_ones_are_refused() -> None:
    lines = command_lines("see `slimebus up run.yaml`:\n\n    slimebus broker r.yaml \\\n        --bind x  # why\n", "slimebus")
    assert sorted(lines) == [["broker", "r.yaml", "--bind", "x"], ["up", "run.yaml"]]
    assert problem_of(["teleport"]) == "no command 'teleport'"
    assert problem_of(["broker", "r.yaml", "--bimd", "x"]) == "no option --bimd"
    assert problem_of(["trainer", "r.yaml", "--recompute-granularity", "full"]) == ""
    assert problem_of(["trainer", "r.yaml", "--recompute-granularty", "full"]) == "no option --recompute-granularty"
    assert len(command_lines(read("README.md"), "slimebus")) > 8


@pytest.mark.parametrize("name", COMMANDS)
def test_cli_document_lists_the_options_of(name: str) -> None:
    section = re.search(rf"^## {name}\n(.*?)(?=^## |\Z)", read("docs/cli.md"), re.MULTILINE | re.DOTALL)
    assert section, f"docs/cli.md has no section for {name}"
    listed = set(re.findall(r"^\| `(--[\w-]+)`", section[1], re.MULTILINE)) - {"--help"}
    assert listed == own_options(COMMANDS[name])


def test_cli_document_has_no_command_that_does_not_exist() -> None:
    assert set(re.findall(r"^## (slimebus.*)$", read("docs/cli.md"), re.MULTILINE)) == set(COMMANDS)


@pytest.mark.parametrize("script", ["quickstart", "bench"])
def test_options_of_scripts_exist(script: str) -> None:
    sources = {"quickstart": ["bin/quickstart", "configs/quickstart/quickstart.py"], "bench": ["tests/bench/bench.py"]}
    known = {"--help"}.union(*(re.findall(r"--[a-z][\w-]*", read(source)) for source in sources[script]))
    for document in DOCUMENTS:
        for words in command_lines(document.read_text(), f"bin/{script}"):
            assert {w for w in words if w.startswith("--")} <= known, document


# --- config ---


def item(text: str) -> str:
    """An item of a list in lines of at most 150 characters; what is set as code stays on one line."""
    joined = re.sub(r"`[^`]*`", lambda code: code[0].replace(" ", "\0"), text)
    return textwrap.fill(joined, 150, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False).replace("\0", " ")


def configuration_page(page: str) -> str:
    """The page with a list of the fields of each section, made from the schema; what stands before and after the lists is kept."""
    before, _, rest = page.partition("\n## ")
    tables = [(name or "Top level", cls, docs) for name, cls, docs in sections()]
    tables.append(("eval.datasets.NAME", EvalDataset, fields_of(EvalDataset)))
    lines = []
    for title, cls, docs in tables:
        lines += ["", f"## {title}", "", (cls.__doc__ or "").strip(), ""]
        lines += [item(f"- `{d.name}` ({d.unit}, default `{d.default}`): {d.meaning}") for d in docs]
    return "\n".join([before.rstrip("\n"), *lines, "", rest[rest.index("## Flags and environment") :]])


def test_configuration_document_is_up_to_date() -> None:
    file = ROOT / "docs" / "configuration.md"
    made = configuration_page(file.read_text())
    if os.environ.get("SLIMEBUS_WRITE_GOLDEN"):
        file.write_text(made)
    assert file.read_text() == made, "write it with SLIMEBUS_WRITE_GOLDEN=1 python -m pytest tests/docs -k configuration"


def test_a_run_has_at_most_137_config_fields() -> None:
    fields = len(paths()) + len(OPEN_MAPS) + len(fields_of(EvalDataset))
    assert fields <= 137, f"{fields} fields; which would a user never set?"


@each_document
def test_every_config_field_named_exists(document: Path) -> None:
    named = re.findall(rf"(?<![\w/.-])((?:{'|'.join(SECTIONS)})\.[a-z_]\w*)(?![\w/(:-])", "\n".join(spans(document.read_text())))
    fields = {name for name in named if name.rpartition(".")[2] not in FILE_SUFFIXES and not (ROOT / name.replace(".", "/")).exists()}
    modules = {name for name in fields if (ROOT / f"{name.replace('.', '/')}.py").is_file()}
    assert not fields - modules - paths().keys() - {"eval.datasets"} - set(OPEN_MAPS)


# --- links and files ---


def slugs(document: Path) -> set[str]:
    heads = re.findall(r"^#+ (.+)$", FENCE.sub("", document.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@each_document
def test_every_link_resolves(document: Path) -> None:
    for target in LINK.findall(FENCE.sub("", document.read_text())):
        if target.startswith(("http:", "https:")):
            continue
        path, _, anchor = target.partition("#")
        file = (document.parent / path).resolve() if path else document
        assert file.exists(), f"{document.name}: {target}"
        assert not anchor or anchor in slugs(file), f"{document.name}: no heading #{anchor} in {file.name}"


def defined_in(file: Path) -> set[str]:
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    return {node.name for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, kinds)}


@each_document
def test_every_file_and_function_named_exists(document: Path) -> None:
    for named in filter(REPOSITORY_PATH.match, spans(document.read_text())):
        path, _, function = named.partition(":")
        assert any(ROOT.glob(path.rstrip("/"))), f"{document.name}: no {path}"
        assert not function or function in defined_in(ROOT / path), f"{document.name}: no {function} in {path}"


def test_every_document_can_be_reached_from_the_readme() -> None:
    reached, todo = set(), [ROOT / "README.md"]
    while todo:
        document = todo.pop()
        if document in reached or document.suffix != ".md":
            continue
        reached.add(document)
        targets = (target.partition("#")[0] for target in LINK.findall(FENCE.sub("", document.read_text())))
        todo += [(document.parent / path).resolve() for path in targets if path and "://" not in path]
    assert not {d.relative_to(ROOT) for d in DOCUMENTS} - {d.relative_to(ROOT) for d in reached}


@each_document
def test_no_line_is_longer_than_160_characters(document: Path) -> None:
    assert not [line for line in document.read_text().splitlines() if len(line) > 160]


@each_document
def test_no_document_names_a_machine_or_an_issue(document: Path) -> None:
    assert not re.findall(r"/work/|/root/|/tmp/\w|/home/|\bissue \d|(?<![\w&])#\d+\b", document.read_text())


# --- packages ---


def test_every_dependency_has_its_reason() -> None:
    project = tomllib.loads(read("pyproject.toml"))
    groups = {"Every role": project["project"]["dependencies"], "To build": project["build-system"]["requires"]}
    groups |= {f"`slimebus[{name}]`": wanted for name, wanted in project["project"]["optional-dependencies"].items()}
    found = dict(re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", read("docs/dependencies.md"), re.MULTILINE | re.DOTALL))
    listed = {title: set(re.findall(r"^\| `([\w.-]+)` \| \S", body, re.MULTILINE)) for title, body in found.items()}
    assert listed == {title: {re.split(r"[<>=!~\[; ]", w)[0] for w in wanted} for title, wanted in groups.items()}


# --- the wire ---


def codes_in(*files: Path) -> set[str]:
    """Literals given as an error's code."""
    return {code for file in files for code in re.findall(r"\bcode\s*=\s*\"(\w+)\"", file.read_text())}


def table_codes() -> set[str]:
    codes = read("docs/protocol.md").split("### Codes", 1)[1].split("\n#", 1)[0]
    return set(re.findall(r"^- `(\w+)` \((?:yes|no)\):", codes, re.MULTILINE))


def test_every_code_the_broker_answers_with_is_in_the_protocol() -> None:
    sources = [*(ROOT / "broker" / "state").glob("*.py"), ROOT / "broker" / "request_loop.py", ROOT / "slimebus" / "bus" / "envelope.py"]
    assert not codes_in(*sources) - table_codes() - {"data"}  # data: refused at the start, never on the wire


def test_every_code_of_the_protocol_exists() -> None:
    python = [file for folder in ("slimebus", "broker") for file in (ROOT / folder).rglob("*.py")]
    assert not table_codes() - codes_in(*python)


def test_the_glossary_has_the_words_of_the_wire() -> None:
    words = read("docs/glossary.md").lower()
    fields: Any = ("lease", "put", "give back", "batch", "commit", "hint", "lineage", "version", "epoch", "attempt", "manifest", "digest")
    assert not [word for word in fields if f"**{word}" not in words]


# --- what people read in logs and in a status ---


COMPOSED = {
    *("is starting", "groups ready", "still pull version"),
    *("the event loop has been blocked for", "the event loop was blocked for", "the broker's loop has been blocked for"),
}
"""Sentences that the code puts together from parts."""


def quoted(items: str) -> list[str]:
    """The quotations that begin each item of a list, split where they leave something out or name a number."""
    heads = [item.partition("`: ")[0] + "`" for item in re.findall(r"^- (`.*(?:\n  .*)*)", items, re.MULTILINE)]
    pieces = [piece for head in heads for text in re.findall(r"`([^`]+)`", head) for piece in re.split(r"\.\.\.|\d+|[A-Z]{2,}", text)]
    return [piece.strip(" :;,'") for piece in pieces if len(piece.strip(" :;,'")) > 5]


@pytest.mark.parametrize("heading", ["### What the status says", "### What a log says"])
def test_the_code_has_every_sentence_that_troubleshooting_explains(heading: str) -> None:
    items = read("docs/troubleshooting.md").split(heading, 1)[1].split("\n#", 1)[0]
    code = "\n".join(file.read_text() for folder in ("slimebus", "broker", "rollout", "trainer") for file in (ROOT / folder).rglob("*.py"))
    plain = re.sub(r"\{[^{}]*\}", "", re.sub(r'"\s*\n\s*f?"', "", code))
    assert len(quoted(items)) > 10
    assert not [piece for piece in quoted(items) if piece not in plain and piece not in code and piece not in COMPOSED]


# --- models ---


def model_rows() -> list[tuple[list[str], list[str]]]:
    """The model types that a row of docs/models.md is about, and its cells."""
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in read("docs/models.md").splitlines() if row.startswith("| ")]
    return [(re.findall(r"`(\w+)`", row[1]), row) for row in rows if len(row) == 5]


def test_models_document_lists_the_families_that_are_trained() -> None:
    from trainer.hf.families import VERIFIED, WRONG

    trained = {kind: row[2] for kinds, row in model_rows() for kind in kinds if kind != "model_type"}
    assert {kind for kind, answer in trained.items() if answer == "yes"} == VERIFIED.keys()
    assert {trained[kind] for kind in WRONG} == {"no"}


def test_models_document_says_which_families_the_embedded_engine_serves() -> None:
    from rollout.embedded.model_config import ARCHITECTURES

    served = {kind for kinds, row in model_rows() if row[3] == "end to end" for kind in kinds}
    assert served == {name.removesuffix("ForCausalLM").lower() for name in ARCHITECTURES} - {"mistral"}  # which is not trained
