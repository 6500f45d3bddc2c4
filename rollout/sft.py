"""Demonstrations as samples: supervised fine-tuning over the same bus, leases and trainer as everything else.

Use as `rollout.custom_generate_function_path: rollout.sft:demonstration` with `engine.engine: none`,
`algorithm.advantage_estimator: sft` and `n_samples_per_prompt: 1`.
"""

from rollout.samples.session import Session


def demonstration(session: Session) -> None:
    """The label as if it had been sampled: its tokens and the end token, trained; no version, so never stale."""
    session.observe(str(session.task.label), is_trained=True)
    if session.tokenizer.eos_token_id is not None:
        session.observe([session.tokenizer.eos_token_id], is_trained=True)
    session.reward = 0.0
