"""A tokenizer as its grammars see it: special tokens have no text, and there is no token beyond the model's logits.

Text that a grammar demands may spell a special token: "</s>" ends struck-out text in HTML. The compiler would force the
token, which is skipped in the output, or ends it. So a special token gets a name here that no text spells, and its
spelling is written with ordinary tokens. A Lark grammar that means the token says so: ``<|name|>`` without quotes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

_SPECIAL = re.compile(r'"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/|//[^\n]*|%json\s*\{|(<(?!\[)[^<>\s"]+>)')


def grammar_spec(spec: Mapping[str, Any], vocab_size: int, ends: Sequence[int]) -> dict[str, Any]:
    """The tokenizer's description, changed as the module says.

    Args:
        spec: ``tokenizer.json``; not changed.
        vocab_size: width of the logits.
        ends: ids that end a request.
    """
    made: dict[str, Any] = json.loads(json.dumps(spec))
    made["padding"] = made["truncation"] = None
    added = [token for token in made.get("added_tokens") or [] if token["id"] < vocab_size]
    made["added_tokens"] = added
    names = {str(t["content"]): f"\uf8ff{t['id']}\uf8ff" for t in added if _special(t, ends)}
    for token in added:
        token["content"] = names.get(token["content"], token["content"])
    model = made["model"]
    vocab = model.get("vocab")
    if isinstance(vocab, dict):
        known = {str(names.get(text, text)): int(id) for text, id in vocab.items() if id < vocab_size}
        model["vocab"] = known
        if len(known) < len(vocab) and isinstance(model.get("merges"), list):
            model["merges"] = [merge for merge in model["merges"] if _made_of(merge, known)]
    elif isinstance(vocab, list):
        model["vocab"] = [[names.get(text, text), score] for text, score in vocab[:vocab_size]]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    return made


def _special(token: Mapping[str, Any], ends: Sequence[int]) -> bool:
    """The compiler takes every added token in angle brackets for a special one, whatever the tokenizer says."""
    text = str(token["content"])
    return bool(token.get("special")) or token["id"] in ends or (text.startswith("<") and text.endswith(">"))


def _made_of(merge: Any, known: Mapping[str, int]) -> bool:
    left, right = merge if isinstance(merge, list) else merge.split(" ", 1)
    return left in known and right in known and left + right in known


def by_id(lark: str, ids: Mapping[str, int]) -> str:
    """``lark`` with the special tokens that it names, outside of its texts, given by their ids."""
    return _SPECIAL.sub(lambda m: f"<[{ids[m[1]]}]>" if m[1] in ids else m[0], lark)
