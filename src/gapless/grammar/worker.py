"""The process that compiles a grammar first: it may take too long, use too much memory or crash, and is then killed.

Run as a script, with the standard library and ``llguidance`` alone. Lines of JSON come and go: first the tokenizer and
the limits; then texts of grammars, each answered by what is wrong with it, or an empty string.

Compiling is not all: a few random outputs are followed, because some grammars compile at once and explode at a mask.
"""

# Nothing of gapless is imported here, so that the process starts at once and its path is all that it needs.

from __future__ import annotations

import json
import random
import sys
import time
from typing import Any

WALKS, TOKENS = 3, 48
"""Random outputs that are followed, and how far."""
MASK_SECONDS = 0.1
"""Processor time that one mask may take. A step waits for its slowest."""
SELF_DESTRUCT_SECONDS = 30
"""If whoever would kill this process has gone."""
MEMORY_BYTES = 4 * 2**30


def check(grammar: str, tokenizer: Any, limits: Any, eos: set[int]) -> str:
    """What is wrong with the grammar; empty if nothing is."""
    import llguidance

    error, messages = llguidance.LLMatcher.validate_grammar_with_warnings(grammar, tokenizer, limits=limits)
    if error or messages:
        return str(messages[0])
    start = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    rng = random.Random(0)
    for _ in range(WALKS):
        matcher = start.deep_copy()
        for _ in range(TOKENS):
            began = time.process_time()
            mask = matcher.compute_bitmask()
            seconds = time.process_time() - began
            if matcher.is_error():
                return str(matcher.get_error())
            if seconds > MASK_SECONDS:
                return (
                    f"it takes {1e3 * seconds:.0f} ms to find the tokens that may come next; at most "
                    f"{1e3 * MASK_SECONDS:.0f} are allowed. Simplify it"
                )
            token = one_of(mask, rng)
            if token is None or token in eos:
                break
            matcher.consume_token(token)
            forced = matcher.compute_ff_tokens()  # it can only go on in one way; not every tokenizer spells it so
            matcher.consume_tokens(forced[: matcher.validate_tokens(forced)])
    return ""


def one_of(mask: bytes, rng: random.Random) -> int | None:
    """A random id whose bit is set, near a random place."""
    first = rng.randrange(len(mask))
    for i in (*range(first, len(mask)), *range(first)):
        if mask[i]:
            token: int = 8 * i + rng.choice([bit for bit in range(8) if mask[i] >> bit & 1])
            return token
    return None


def main() -> None:
    """Answer until the input ends."""
    import llguidance

    alarm: Any = None
    try:
        import resource
        import signal

        alarm = signal.alarm
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    except (ImportError, ValueError, OSError):
        pass  # not on this system: the time limit remains
    options = json.loads(sys.stdin.readline())
    limits = llguidance.LLParserLimits(**options["limits"])
    tokenizer = llguidance.LLTokenizer(
        options["tokenizer"], n_vocab=options["vocab_size"], eos_token=options["eos_token_ids"]
    )
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        if alarm is not None:
            alarm(SELF_DESTRUCT_SECONDS)
        print(json.dumps(check(json.loads(line), tokenizer, limits, set(options["eos_token_ids"]))), flush=True)
        if alarm is not None:
            alarm(0)


if __name__ == "__main__":
    main()
