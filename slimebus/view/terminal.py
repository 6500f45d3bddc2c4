"""A run's status in a terminal: as a screen while it goes on, as lines for one look, as one line where nobody looks.

A screen has facts above, each with its label, and below as many tables as fit, side by side where the terminal is wide enough.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from slimebus.bus.envelope import one_line
from slimebus.telemetry.formatting import align_columns, format_count, format_duration
from slimebus.view.report import main_dataset

if TYPE_CHECKING:
    from rich.panel import Panel
    from rich.text import Text

BARS = "▁▂▃▄▅▆▇█"
BAR_WIDTH, TEXT_WIDTH = 40, 40
"""In characters: of the bar of steps and of the sparkline at most, and what is left beside them in a narrow terminal."""
LABEL_WIDTH, NAME_WIDTH, GAP = 11, 32, 3
MIN_TABLE_LINES = 3
"""A table with less room, its head included, is left out."""
MAX_WAITS, WRAPPED_LINES = 3, 2
"""Waits that a screen shows, and lines that each text may take."""
BRIEF_ROWS = {"process": 12, "step": 4, "dataset": 4}
"""The tables of one look, by the head of their first column, and how many rows each has at most."""
LEARNING = ("loss", "grad_norm", "kl_loss", "approx_kl", "entropy")
STEP_COLUMNS = ("reward", *LEARNING[:-1], "lag_mean", "lag_max", "wait_s", "train_s", "entropy", "tokens")
EVALUATION_COLUMNS = ("dataset", "version", "mean_reward", "low", "high", "num_samples", "num_failed")

Status = Mapping[str, Any]
"""As docs/protocol.md has it."""
Table = list[list[str]]
"""Its head, then its rows."""


def screen(status: Status, *, is_supervised: bool, width: int, height: int, problem: str = "") -> "Panel":
    """The run in a frame of exactly this size. problem: why the status is not of now; empty: it is."""
    from rich.console import Group
    from rich.panel import Panel
    from rich.text import Text

    alerts = [text for text in (problem, _stalled(status)) if text]
    signal, values = _signals(status, is_supervised=is_supervised)
    bar_width = max(0, min(BAR_WIDTH, width - TEXT_WIDTH))
    drawn = {"step": (_bar(status, bar_width), "cyan"), signal: (sparkline(values, bar_width), "dark_orange")}
    body = [Text(line, "bold red") for text in alerts for line in _wrapped(text, width - 4)]
    waits = "\n".join(_waits(status))
    for label, text in (facts(status, is_supervised=is_supervised) | {"waiting": waits} | _warnings(status)).items():
        shape, style = drawn.get(label, ("", ""))
        first, *more = _wrapped(text, width - 4 - LABEL_WIDTH)
        body.append(Text.assemble((f"{label:<{LABEL_WIDTH}}", "dim"), (f"{shape}  " if shape else "", style), first))
        body += [Text(" " * LABEL_WIDTH + line) for line in more]
    inner = height - 2
    body += _fit(tables(status), width - 4, inner - len(body))
    body = [*body, *(Text() for _ in range(inner))][:inner]
    for line in body:
        line.no_wrap, line.overflow = True, "ellipsis"
    title = Text(f"{status['run']}: {'no answer' if problem else status['state']}", "bold")
    style = "red" if alerts else "dim"
    return Panel(Group(*body), title=title, title_align="left", border_style=style, padding=(0, 1), width=width, height=height)


def brief(status: Status, *, is_supervised: bool) -> list[str]:
    """What a person reads in five seconds: what the run does, what it learns, its processes, what went wrong and who waits."""
    of_version = f", version {status['version']}" if status["version"] >= 0 else ""
    lines = [f"run {status['run']}: {status['state']}, step {status['step']} of {status['num_steps'] or '?'}{of_version}"]
    texts = facts(status, is_supervised=is_supervised) | _warnings(status)
    lines += [f"  {label:<{LABEL_WIDTH}}{text}" for label, text in texts.items()]
    for head, *rows in tables(status):
        if rows and (limit := BRIEF_ROWS.get(head[0])):
            lines += ["", *(f"  {line}" for line in align_columns(rows[:limit], head))]
            lines += [f"  and {len(rows) - limit} more (--json)"] if len(rows) > limit else []
    waits = [f"  {sentence}" for sentence in status["waiting"]]
    return [one_line(line) for line in [*filter(None, [_stalled(status)]), *lines, *([""] if waits else []), *waits]]


def plain_line(status: Status, *, is_supervised: bool) -> str:
    """The run in one line, to be printed every few seconds."""
    texts = facts(status, is_supervised=is_supervised)
    parts = [f"{label} {texts[label]}" for label in texts if label not in ("learning", "groups")]
    return one_line(" | ".join([f"{status['run']} {status['state']}", *parts, *status["waiting"][:1]]))


def facts(status: Status, *, is_supervised: bool) -> dict[str, str]:
    """The state of the run, label to text. Lags are in versions, over the trained tokens of the last step."""
    groups, is_over = status["groups"], status["state"] == "finished"
    last = status["steps"][-1]["metrics"] if status["steps"] else {}
    signal, values = _signals(status, is_supervised=is_supervised)
    learning = [f"{name} {text_of(last[name])}" for name in LEARNING if name in last and name != signal]
    time_s = time_left(last.get("elapsed_s", 0.0), (status["num_steps"] or 0) - status["step"], status["pace"]["step_s"])
    found = {
        "step": f"{status['step']}/{status['num_steps'] or '?'}  {time_s}",
        signal: f"{values[-1]:.3f}" if values else "none yet",
        "learning": ", ".join(learning),
        "held-out": _held_out(status),
        "lag": f"mean {last.get('lag_mean', 0.0):.2f}, largest {last.get('lag_max', 0.0):g}, bound {_bound(status)}",
        "tokens/s": _speed(status, last),
        "groups": "" if is_over else ", ".join(f"{groups[phase]} {phase}" for phase in ("queued", "leased", "ready", "assigned")),
    }
    return {label: text for label, text in found.items() if text}


def tables(status: Status) -> list[Table]:
    """Processes, steps and evaluations (the newest first), trained groups by their lag, groups by what became of them."""
    steps = [(row["step"], row["metrics"]) for row in reversed(status["steps"])]
    measured = [name for name in STEP_COLUMNS if any(name in metrics for _, metrics in steps)]
    scored = [row for row in reversed(status["evaluations"]) if row["done"]]
    lags, total = status["lag"]["histogram"], max(1, sum(status["lag"]["histogram"].values()))
    wasted = [[f"wasted: {why}", str(one["groups"]), format_count(one["tokens"])] for why, one in status["waste"].items()]
    return [
        [
            ["process", "role", "state", "lag", "groups", "tokens/s", "last heard"],
            *(_process(client, status["version"]) for client in sorted(status["clients"], key=_has_left)),
        ],
        [["step", *measured], *([str(step), *(text_of(metrics.get(name)) for name in measured)] for step, metrics in steps)],
        [list(EVALUATION_COLUMNS), *([text_of(row[name]) for name in EVALUATION_COLUMNS] for row in scored)],
        [["lag", "trained groups", ""], *([lag, str(groups), f"{groups / total:.0%}"] for lag, groups in lags.items())],
        [
            ["groups", "number", "tokens"],
            *([phase, str(number), ""] for phase, number in status["groups"].items() if number and not phase.endswith("_bytes")),
            *wasted,
        ],
    ]


def sparkline(values: Sequence[float], width: int) -> str:
    """The last `width` values as bars between the least and the largest of them; equal ones are all of middle height."""
    values = values[-width:] if width else []
    low, high = min(values, default=0.0), max(values, default=0.0)
    if high == low:
        return BARS[len(BARS) // 2 - 1] * len(values)
    return "".join(BARS[min(len(BARS) - 1, int((v - low) / (high - low) * len(BARS)))] for v in values)


def time_left(elapsed_s: float, steps_left: int, step_s: float) -> str:
    """Time that the trainer took, and the time that the remaining steps take at `step_s` each; 0: not known yet."""
    if steps_left <= 0 or not step_s:
        return format_duration(elapsed_s)
    return f"{format_duration(elapsed_s)}, {format_duration(steps_left * step_s)} left"


def text_of(value: Any) -> str:
    """A value of the status in few characters."""
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else format_count(value)
    return "-" if value in (None, "") else str(value)


def _signals(status: Status, *, is_supervised: bool) -> tuple[str, list[float]]:
    """What the run improves, and its value at each of the last steps."""
    signal = "loss" if is_supervised else "reward"
    return signal, [row["metrics"].get(signal, 0.0) for row in status["steps"]]


def _held_out(status: Status) -> str:
    """The mean rewards of the main dataset, newest and oldest."""
    dataset = main_dataset(row["dataset"] for row in status["evaluations"])
    rows = [row for row in status["evaluations"] if row["dataset"] == dataset and row["done"] and row["mean_reward"] is not None]
    rows.sort(key=lambda row: int(row["version"]))
    return f"{rows[-1]['mean_reward']:.3f} ({rows[0]['mean_reward']:.3f} before)" if rows else "not measured"


def _bound(status: Status) -> str:
    bound = status["settings"]["max_staleness"]
    return bound if isinstance(bound, str) else f"{bound:g}"


def _speed(status: Status, last: Mapping[str, float]) -> str:
    """What the trainer trained in the last step, and what workers made over the last steps or, before there are two, over their lives."""
    workers = [client for client in status["clients"] if client["role"] == "rollout" and not _has_left(client)]
    trained = last.get("num_tokens", 0.0) / max(1e-9, last.get("train_s", 0.0) + last.get("wait_s", 0.0))
    first, newest = (status["steps"] or [{}])[0], (status["steps"] or [{}])[-1]
    made = newest.get("rollout_tokens", 0.0) - first.get("rollout_tokens", 0.0)
    seconds = last.get("elapsed_s", 0.0) - first.get("metrics", {}).get("elapsed_s", 0.0)
    made_per_s = made / seconds if made > 0 and seconds > 0 else sum(_lifetime_rate(worker["metrics"]) for worker in workers)
    if status["state"] == "finished":
        return f"trainer {format_count(trained)}, workers {format_count(made_per_s)}"
    num_workers = f"{len(workers)} worker{'' if len(workers) == 1 else 's'}"
    return f"trainer {format_count(trained)}, {num_workers} {format_count(made_per_s if workers else 0.0)}"


def _lifetime_rate(metrics: Mapping[str, float]) -> float:
    """Tokens a second of a worker, over the time that it served."""
    return metrics.get("tokens", 0.0) / max(1.0, metrics.get("serving_s", 0.0))


def _has_left(client: Mapping[str, Any]) -> bool:
    return client["state"] in ("gone", "fenced")


def _process(client: Mapping[str, Any], newest: int) -> list[str]:
    version, metrics = client["version"], client["metrics"]
    lag = "-" if version is None or version < 0 else str(newest - version)
    speed = format_count(_lifetime_rate(metrics)) if "serving_s" in metrics else "-"
    name = (
        client["name"]
        if len(client["name"]) <= NAME_WIDTH
        else f"{client['name'][: NAME_WIDTH // 2 - 1]}…{client['name'][-NAME_WIDTH // 2 :]}"
    )
    return [name, client["role"], client["state"], lag, str(client["leases"]), speed, f"{client['silent_s']:.0f} s ago"]


def _warnings(status: Status) -> dict[str, str]:
    """What is not as it should be, label to text."""
    waste = (
        f"{one['groups']} groups {reason} ({format_count(one['tokens'])} tokens)"
        for reason, one in status["waste"].items()
        if one["groups"]
    )
    counted = status.get("counted", {})
    ended = [row for row in status["evaluations"][-1:] if row["done"] and row["reason"]]
    failed, dead, skipped = counted.get("samples failed"), status["groups"].get("dead"), status.get("source", {}).get("skipped")
    found = {
        "waste": ", ".join(waste),
        "failed": f"{failed} of {counted.get('samples put', 0)} samples had no reward; the logs of workers say why" if failed else "",
        "evaluation": "".join(f"of version {row['version']} ended early: {row['reason']}" for row in ended),
        "dead": f"{dead} groups (slimebus buffer ls --state dead)" if dead else "",
        "skipped": f"{skipped} bad prompts" if skipped else "",
        "security": status.get("security", {}).get("problem") or "",
        "disk": status.get("store", {}).get("problem") or "",
        "releases": _other_releases(status),
    }
    return {label: text for label, text in found.items() if text}


def _other_releases(status: Status) -> str:
    """What others run than the broker: an upgrade that is half done."""
    ours = status.get("release", "")
    others = Counter(one for client in status["clients"] if not _has_left(client) and (one := client.get("release") or ours) != ours)
    return f"broker {ours}; {', '.join(f'{count} of {one}' for one, count in others.items())}" if others else ""


def _stalled(status: Status) -> str:
    stalled = status["stalled"]
    return f"stalled for {stalled['since_s']:.0f} s (limit {stalled['limit_s']:.0f} s): {stalled['reason']}" if stalled else ""


def _waits(status: Status) -> list[str]:
    """A few of the sentences on what each process waits for."""
    hidden = len(status["waiting"]) - MAX_WAITS
    return [*status["waiting"][:MAX_WAITS], *([f"({hidden} more wait)"] if hidden > 0 else [])] or ["nobody"]


def _wrapped(text: str, width: int) -> list[str]:
    """Each line of the text in a few lines of the screen."""
    cut = [wrap(one_line(line), max(1, width), max_lines=WRAPPED_LINES, placeholder=" …") for line in text.splitlines()]
    return [part for parts in cut for part in parts]


def _bar(status: Status, width: int) -> str:
    done: int = round(width * min(1.0, status["step"] / max(1, status["num_steps"] or 0)))
    return "█" * done + "░" * (width - done)


def _fit(tables: Sequence[Table], width: int, height: int) -> "list[Text]":
    """The tables in at most `height` lines: side by side where they fit, the last ones cut or left out."""
    from rich.text import Text

    shelves: list[list[list[str]]] = []
    used = width
    for head, *rows in tables:
        lines = _narrowed([head, *rows], width)
        wide = max(map(len, lines))
        if rows and used + GAP + wide <= width:
            shelves[-1].append(lines)
            used += GAP + wide
        elif rows:
            shelves.append([lines])
            used = wide
    shelves = shelves[: max(0, height) // (MIN_TABLE_LINES + 1)]
    share = height // max(1, len(shelves))
    needs = [min(share, 1 + max(map(len, shelf))) for shelf in shelves]  # an empty line is above each
    found: list[Text] = []
    for i, shelf in enumerate(shelves):
        room = height - len(found) - 1 - sum(needs[i + 1 :])
        first, *others = _side_by_side([_cut(lines, room) for lines in shelf])
        found += [Text(), Text(first, "bold"), *map(Text, others)]
    return found


def _narrowed(table: Table, width: int) -> list[str]:
    """The table without its last columns, where it would be wider than this."""
    while max(map(len, lines := align_columns(table))) > width and len(table[0]) > 1:
        table = [row[:-1] for row in table]
    return lines


def _cut(lines: list[str], room: int) -> list[str]:
    return lines if len(lines) <= room else [*lines[: room - 1], f"and {len(lines) - room + 1} more"]


def _side_by_side(blocks: Sequence[Sequence[str]]) -> list[str]:
    return align_columns(zip_longest(*blocks, fillvalue=""), gap=GAP)
