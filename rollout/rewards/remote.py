"""What an HTTP service answers: POST `{"prompt", "response", "label"}` to rollout.rm_url gives a number, or a map (rollout.reward_key).

As slime's `remote_rm`. A connection that fails and a status of 5xx are tried again until rollout.reward_timeout_s.
"""

import asyncio
from typing import Any

import aiohttp

from rollout.samples.response import Response

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 10.0


async def reward(response: Response, url: str) -> Any:
    """The answer, decoded."""
    return await ask(url, {"prompt": response.prompt, "response": response.text, "label": response.label})


async def ask(url: str, body: dict[str, Any]) -> Any:
    """The JSON answer to this JSON. Raises aiohttp.ClientResponseError for a status of 4xx."""
    pause_s = FIRST_PAUSE_S
    async with aiohttp.ClientSession() as session:
        while True:
            try:
                async with session.post(url, json=body) as reply:
                    reply.raise_for_status()
                    return await reply.json(content_type=None)
            except aiohttp.ClientResponseError as bad:
                if bad.status < 500:
                    raise
            except aiohttp.ClientConnectionError:
                pass
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
