"""Reinforcement learning in one process: the engine generates, the trainer changes the weights, nothing restarts.

    python examples/rl_loop.py [--rounds N] [--model FOLDER]

The task is silly on purpose, so that a small model learns it in seconds on a CPU: say even token ids. A group of
completions of each prompt is drawn; their rewards, less the group's mean, weigh the log-probabilities of their tokens
(REINFORCE with a group baseline, as in GRPO without its clipping). Both sides hold the same parameters: after
``optimizer.step()`` one call lets the engine use them, and it copies nothing.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch

from gapless import LLM, RequestOutput, SamplingParams


def tiny_model() -> Any:
    """A random Llama of 50 thousand parameters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return LlamaForCausalLM(config)


def reward(token_ids: list[int]) -> float:
    """The share of even ids."""
    return sum(token % 2 == 0 for token in token_ids) / len(token_ids)


def loss_of(model: Any, outputs: list[RequestOutput]) -> tuple[torch.Tensor, float]:
    """Minus the advantage-weighted log-probability of all drawn tokens, and the mean reward."""
    rows, advantages, starts, rewards = [], [], [], []
    for output in outputs:
        scores = torch.tensor([reward(c.token_ids) for c in output.outputs])
        rewards.append(float(scores.mean()))
        for completion, advantage in zip(output.outputs, scores - scores.mean(), strict=True):
            rows.append(output.prompt_token_ids + completion.token_ids)
            advantages.append(advantage)
            starts.append(len(output.prompt_token_ids))
    ids = torch.tensor(rows, device=model.device)  # here all have one length; real data needs padding and a mask
    logprobs = model(ids[:, :-1]).logits.float().log_softmax(-1)
    drawn = logprobs.gather(-1, ids[:, 1:, None])[..., 0]
    mask = torch.arange(1, ids.shape[1], device=ids.device)[None] >= torch.tensor(starts, device=ids.device)[:, None]
    weights = torch.stack(advantages).to(ids.device)[:, None]
    return -(drawn * mask * weights).sum() / mask.sum(), sum(rewards) / len(rewards)


def main() -> float:
    """Train; return the last round's mean reward."""
    parser = argparse.ArgumentParser(description="Reinforcement learning on a toy reward.")
    parser.add_argument("--model", help="a folder or a name (default: a tiny random model)")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--group", type=int, default=16, help="completions of each prompt")
    parser.add_argument("--new-tokens", type=int, default=12)
    parser.add_argument("--learning-rate", type=float, default=None)
    args = parser.parse_args()

    if args.model:
        from transformers import AutoModelForCausalLM

        model: Any = AutoModelForCausalLM.from_pretrained(args.model, dtype="auto")
    else:
        model = tiny_model()
    if torch.cuda.is_available():
        model.cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate or (2e-5 if args.model else 5e-3))
    params = SamplingParams(n=args.group, temperature=1.0, max_tokens=args.new_tokens, ignore_eos=True)
    prompts: Any = [{"prompt_token_ids": [7 * i + j for j in range(4)]} for i in range(4)]
    mean = 0.0
    with LLM(model, max_model_len=128, max_num_seqs=64, num_kv_blocks=1024) as llm:
        for round in range(args.rounds):
            start = time.perf_counter()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            generated = time.perf_counter()
            if any(o.first_weight_version != round or o.weight_version != round for o in outputs):
                raise RuntimeError("a completion is not of this round's weights")
            loss, mean = loss_of(model, outputs)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            trained = time.perf_counter()
            llm.update_weights()
            done = time.perf_counter()
            print(
                f"round {round:2d}  reward {mean:.3f}  generate {1e3 * (generated - start):5.0f} ms  "
                f"train {1e3 * (trained - generated):5.0f} ms  update {1e3 * (done - trained):5.1f} ms"
            )
    return mean


if __name__ == "__main__":
    main()
