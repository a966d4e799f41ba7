"""From what a request asks of its form to the text that ``llguidance`` compiles."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from gapless.grammar.tokenizer_spec import by_id
from gapless.request.schema_numbers import exact
from gapless.request.structured import StructuredOutputsParams

WHITESPACE = {"whitespace_flexible": True, "whitespace_pattern": r"[ \n\r\t]{0,2}"}
"""Between two tokens of JSON: a model that likes spaces must come to an end all the same."""
_METASPACE = "\u2581"
_CONTROLS = re.compile("[\x7f-\x9f]")
"""JSON leaves them as they are, and the texts of a Lark grammar may not hold them."""


def grammar_text(
    asked: StructuredOutputsParams, special: Mapping[str, int] | None = None, *, drops_a_space: bool = False
) -> str:
    """The text of a grammar.

    Args:
        asked: the form.
        special: ids of the added tokens, by their text.
        drops_a_space: of the tokenizer, see the function of this name. The grammar then has one more.
    """
    import llguidance

    make = llguidance.LLMatcher
    if asked.json is not None or asked.json_object:
        schema = str(asked.json) if asked.json is not None else '{"type":"object"}'
        whitespace: Any = {"whitespace_flexible": False} if asked.disable_any_whitespace else WHITESPACE
        return str(make.grammar_from_json_schema(schema, overrides=whitespace))
    if asked.regex is not None:
        if not drops_a_space:
            return str(make.grammar_from_regex(asked.regex))
        whole = f"/{_slashes(asked.regex)}/"
        return str(
            make.grammar_from_lark(
                f"start: SPACED | PLAIN\nSPACED: \" \" BOTH\nBOTH: {whole} & / (?s:.)*/\n"
                f"PLAIN: {whole} & ~/ (?s:.)*/"
            )
        )
    if asked.choice is not None:
        texts = (f" {text}" if drops_a_space and text.startswith(" ") else text for text in asked.choice)
        quoted = map(_quoted, texts)
        return str(make.grammar_from_lark(f"start: CHOICE\nCHOICE: {' | '.join(quoted)}"))
    return str(make.grammar_from_lark(bounded_json(by_id(str(asked.grammar), special or {}))))


def drops_a_space(tokenizer: Any) -> bool:
    """Whether its decoder leaves out a space at the beginning of a text, as those of SentencePiece do."""
    vocabulary = tokenizer.backend_tokenizer.get_vocab(with_added_tokens=False)
    for text, id in vocabulary.items():
        if text.startswith(_METASPACE) and text[1:].isalpha():
            return not str(tokenizer.decode([id], clean_up_tokenization_spaces=False)).startswith(" ")
    return False


def bounded_json(lark: str) -> str:
    """Schemas within a Lark grammar (``%json``) with the rules of all others: bounded whitespace, exact numbers.

    Raises:
        RequestError: a number cannot be kept exactly.
    """
    made, at = [], 0
    for match in re.finditer(r"%json\s*(?=\{)", lark):
        if match.start() < at:
            continue
        try:
            schema, end = json.JSONDecoder().raw_decode(lark, match.end())
        except ValueError:
            continue  # the compiler says what is wrong with it
        schema = exact(schema, "structured_outputs.grammar")
        schema["x-guidance"] = {**WHITESPACE, **(schema.get("x-guidance") or {})}
        made += [lark[at : match.end()], json.dumps(schema, ensure_ascii=False)]
        at = end
    return "".join([*made, lark[at:]])


def _quoted(text: str) -> str:
    return _CONTROLS.sub(lambda match: f"\\u{ord(match[0]):04x}", json.dumps(text, ensure_ascii=False))


def _slashes(regex: str) -> str:
    """A regular expression that may stand between slashes."""
    return re.sub(r"\\.|/|\n", lambda m: {"/": r"\/", "\n": r"\n"}.get(m[0], m[0]), regex, flags=re.DOTALL)
