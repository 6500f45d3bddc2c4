"""The agent on docs/agents.md runs, with an unmodified openai client."""

import asyncio
import re
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from letters import Letters

from rollout.samples.response import Response, Task
from rollout.worker.groups import GroupMaker
from slimebus.bus.messages import LeasedGroup
from slimebus.config import resolve

PAGE = (Path(__file__).parents[2] / "docs" / "agents.md").read_text()
(EXAMPLE,) = re.findall(r"<!-- run: \w+ -->\n```python\n(.*?)```", PAGE, re.DOTALL)


class Calls:
    """Engines that call the tool first, and say its answer then."""

    async def sample(self, tasks: list[Task], begun: Any = None) -> list[Response]:
        return [self._answer(task) for task in tasks]

    def _answer(self, task: Task) -> Response:
        has_answer = "tool:5;" in Letters().decode(task.prompt_ids)
        ids = Letters().encode("5" if has_answer else '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>')
        return Response(task=task, token_ids=ids, logprobs=np.zeros(len(ids), np.float32), versions=[(3, len(ids))], text="")


def test_the_agent_calls_its_tool_and_is_rewarded(tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text(EXAMPLE)
    config = resolve(None, {"rollout.custom_generate_function_path": "helper.py:Helper", "engine.engine": "cpu"}, {}).config
    maker = GroupMaker(config, tmp_path, Letters(end=None), Calls())  # type: ignore[arg-type]
    record = msgspec.msgpack.encode({"prompt": [{"role": "user", "content": "2+3?"}], "label": "5"})

    async def run() -> list[Any]:
        await maker.setup()
        try:
            return await maker.make_group(LeasedGroup(group="0/1", lease=1, num_samples=2, deadline_s=60.0), record)
        finally:
            await maker.teardown()

    samples = asyncio.run(run())
    assert [(sample.reward, sample.turn, sample.metadata) for sample in samples] == [(1.0, 1, {"contexts": 1})] * 2
