"""TRL's losses and advantages on given numbers: JSON of test_formulas.py on stdin, JSON on stdout. In a process of its own, with the
wheel on its path.

The trainers are not built: their methods are called on an object that has the few fields they read.
"""

import contextlib
import json
import sys
from collections import defaultdict
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

from absent_packages import stand_in

stand_in("accelerate", "datasets", "pandas", "peft")

import torch  # noqa: E402
from trl.trainer import grpo_trainer, rloo_trainer  # noqa: E402
from trl.trainer.grpo_trainer import GRPOTrainer  # noqa: E402
from trl.trainer.rloo_trainer import RLOOTrainer  # noqa: E402

for module in (grpo_trainer, rloo_trainer):
    module.gather = module.gather_object = lambda values: values  # accelerate's, of one process

ACCELERATOR = SimpleNamespace(
    num_processes=1,
    process_index=0,
    device=torch.device("cpu"),
    gather=lambda x: x,
    gather_for_metrics=lambda x: x,
    reduce=lambda x, **_: x,
)


def loss_of(numbers: dict[str, Any], case: dict[str, Any], longest: int) -> dict[str, Any]:
    """GRPOTrainer's loss for the settings of a case, and its gradient by the new logprobs."""
    new = torch.tensor(numbers["new"], dtype=torch.float64, requires_grad=True)
    mask = torch.tensor(numbers["mask"]).long()
    inputs = {
        **{name: torch.zeros(len(new), 1, dtype=torch.long) for name in ("prompt_ids", "prompt_mask")},
        **dict.fromkeys(("completion_ids", "completion_mask"), mask),
        "advantages": torch.tensor(numbers["advantages"], dtype=torch.float64),
        "old_per_token_logps": torch.tensor(numbers["rollout"], dtype=torch.float64),
        "ref_per_token_logps": torch.tensor(numbers["reference"], dtype=torch.float64),
        "num_items_in_batch": mask.sum(),
    }
    vespo = {"vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0}
    args = SimpleNamespace(delta=case.get("delta"), use_bias_correction_kl=case.get("unbiased", False), steps_per_generation=1, **vespo)
    fields = {
        "args": args,
        "accelerator": ACCELERATOR,
        "model": SimpleNamespace(training=True),
        "loss_type": case["loss_type"],
        "epsilon_low": case.get("low", 0.2),
        "epsilon_high": case.get("high", 0.2),
        "beta": case.get("beta", 0.0),
        "importance_sampling_level": case.get("level", "token"),
        "max_completion_length": longest,
        "aux_loss_enabled": False,
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": case.get("off_policy"),
        "get_off_policy_mask": GRPOTrainer.get_off_policy_mask,
        "get_gamma_weights": GRPOTrainer.get_gamma_weights,
        "use_vllm": False,
        "current_gradient_accumulation_steps": 1,
        "_entropy_bonus_enabled": False,
        "_metrics": defaultdict(lambda: defaultdict(list)),
        "_get_per_token_logps_and_entropies": lambda *_, **__: (new, torch.zeros_like(new), None),
    }
    loss = GRPOTrainer._compute_loss(SimpleNamespace(**fields), None, inputs)
    loss.backward()
    return {"loss": loss.item(), "gradient": new.grad.tolist()}


def advantages_of(numbers: dict[str, Any], case: dict[str, Any]) -> list[float]:
    """What a trainer gives the rewards of groups of one size: GRPOTrainer's `scale_rewards`, or RLOOTrainer's with beta * KL taken off."""
    cls: Any = {"grpo": GRPOTrainer, "rloo": RLOOTrainer}[case["trainer"]]
    lengths = [int(sum(row)) for row in numbers["mask"]]
    ids = [[1] * length for length in lengths]
    model, reference = (SimpleNamespace(training=True, is_gradient_checkpointing=False) for _ in range(2))
    logprobs = {id(model): numbers["rollout"], id(reference): numbers["reference"]}
    trainer = MagicMock()
    fields = {
        "accelerator": ACCELERATOR,
        "model": model,
        "ref_model": reference,
        "beta": case.get("beta", 0.0),
        "num_generations": numbers["groups"].count(0),
        "scale_rewards": case.get("scale"),
        "multi_objective_aggregation": "sum_then_normalize",
        "normalize_advantages": False,
        "reward_weights": torch.ones(1),
        "reward_clip_range": None,
        "reward_func_names": ["reward"],
        "mask_truncated_completions": False,
        "pad_to_multiple_of": None,
        "use_vllm": False,
        "log_multimodal": False,
        "tools": None,
        "environments": None,
        "num_iterations": 1,
        "_metrics": defaultdict(lambda: defaultdict(list)),
        "_logs": MagicMock(),
        "_pending_extra_logs": {},
        "_pending_metrics": {},
        "environment_factories": None,
        "reward_funcs": [None],
        "aux_loss_enabled": False,
    }
    for name, value in fields.items():
        setattr(trainer, name, value)
    trainer._tokenizer.pad_token_id = 0
    trainer.args.steps_per_generation = trainer.args.gradient_accumulation_steps = 1
    texts = ["x"] * len(ids)
    generated = (ids, ids, texts) if case["trainer"] == "rloo" else (ids, ids, None, texts, None, {}, None, None)
    trainer._generate = lambda prompts: generated
    trainer._calculate_rewards = lambda *_: torch.tensor(numbers["rewards"])[:, None]
    trainer._get_per_token_logps_and_entropies = lambda of, *_, **__: (torch.tensor(logprobs[id(of)]), None, None)
    inputs = [{"prompt": "x"} for _ in ids]
    return cls._generate_and_score_completions(trainer, inputs)["advantages"].tolist()


def main() -> None:
    """Answer each case on each set of numbers."""
    asked = json.load(sys.stdin)
    answers = []
    with contextlib.redirect_stdout(sys.stderr):
        for numbers in asked["numbers"]:
            made = dict[str, Any]()
            for name, case in asked["cases"].items():
                is_loss = case["kind"] == "loss"
                made[name] = loss_of(numbers, case, asked["longest"]) if is_loss else advantages_of(numbers, case)
            answers.append(made)
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
