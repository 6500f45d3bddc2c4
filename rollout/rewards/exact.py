"""1 when the response, stripped, is the label and ended by itself."""

from rollout.samples.response import Response

IN_WORKER = True


def reward(response: Response) -> float:
    """1.0 or 0.0; a response that was cut off is wrong."""
    return float(response.finish_reason == "stop" and response.text.strip() == str(response.label).strip())
