"""A small real model fills a form: JSON that fits a schema, a choice, and a date.

    python examples/structured.py

Needs `pip install '.[structured,gguf]'`; the model is fetched once.
"""

from __future__ import annotations

import json

from gapless import LLM, SamplingParams
from gapless.model.load.smollm2 import get_smollm2

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "born": {"type": "integer", "minimum": 1000, "maximum": 2100},
        "fields": {"type": "array", "items": {"enum": ["mathematics", "physics", "music"]}, "maxItems": 2},
    },
    "required": ["name", "born", "fields"],
    "additionalProperties": False,
}
QUESTIONS = [
    ("Describe Ada Lovelace as a JSON object with name, born and fields.", {"json": PERSON}),
    ("Is a whale a fish? Answer yes or no.", {"choice": ["yes", "no"]}),
    ("On which day did people first walk on the Moon?", {"regex": r"\d{4}-\d{2}-\d{2}"}),
]


def main() -> None:
    with LLM(get_smollm2(), max_num_seqs=4, max_model_len=512) as llm:
        params = [SamplingParams(temperature=0, max_tokens=100, structured_outputs=form) for _, form in QUESTIONS]
        conversations = [[{"role": "user", "content": question}] for question, _ in QUESTIONS]
        for output in llm.chat(conversations, params, use_tqdm=False):
            print(output.outputs[0].text)
            if output.outputs[0].text.startswith("{"):
                print("born:", json.loads(output.outputs[0].text)["born"])
        stats, _ = llm.stats()
        print(
            f"{stats.steps} steps, {stats.held_steps} of them waited for masks: {1e3 * stats.idle_masks:.2f} ms on the "
            f"device in all, {1e3 * stats.host['mask']:.2f} ms of the host"
        )


if __name__ == "__main__":
    main()
