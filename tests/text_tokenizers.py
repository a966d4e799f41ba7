"""Small tokenizers for the tests of the text layer, built in memory."""

from __future__ import annotations

from functools import cache
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizer, PreTrainedTokenizerFast

CORPUS = [
    "hello world, the quick brown fox jumps over the lazy dog",
    "你好世界 日本語 héllo wörld 🙂🙂 stop STOP",
] * 4


def _wrap(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


@cache
def byte_level() -> Any:
    """Byte-level BPE like SmolLM2's, with an added token that is not special."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<s>", "</s>", "<unk>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(["<extra token>"])
    return _wrap(tokenizer)


def _pieces() -> list[str]:
    words = ["▁hello", "▁world", "▁", "he", "llo", "wor", "ld", "▁▁", "stop", "▁st", "op", "\u4f60"]
    letters = list("abcdefghijklmnopqrstuvwxyz.,!?<>0x")
    return ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *words, *letters]


@cache
def llama_like() -> Any:
    """BPE with byte fallback and Llama 2's decoder, which cuts one leading space."""
    vocab = {t: i for i, t in enumerate(_pieces())}
    merges = [("he", "llo")] if "hello" in vocab else []
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _wrap(tokenizer)


@cache
def unigram() -> Any:
    """Unigram with byte fallback and a Metaspace decoder."""
    scores = [(t, -1.0 * len(t) if t.startswith("<0x") else -2.0) for t in _pieces()]
    tokenizer = Tokenizer(models.Unigram(scores, unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return _wrap(tokenizer)


@cache
def word_piece() -> Any:
    """WordPiece, whose decoder has no token table."""
    words = ["[UNK]", "<s>", "</s>", "<unk>", "hello", "world", "##ing", "##s", ",", ".", "do", "n't"]
    tokenizer = Tokenizer(models.WordPiece({t: i for i, t in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return _wrap(tokenizer)


class SlowBytes(PreTrainedTokenizer):  # type: ignore[misc]
    """A tokenizer in Python: id 0 ends, id 1 + b is byte b."""

    def __init__(self, **options: Any) -> None:
        super().__init__(eos_token="</s>", **options)

    @property
    def vocab_size(self) -> int:
        """One id per byte and the end."""
        return 257

    def get_vocab(self) -> dict[str, int]:
        """Tokens are written as numbers."""
        return {"</s>": 0} | {str(b): 1 + b for b in range(256)}

    def _tokenize(self, text: str, **options: Any) -> list[str]:
        return [str(b) for b in text.encode()]

    def _convert_token_to_id(self, token: str) -> int:
        return self.get_vocab()[token]

    def _convert_id_to_token(self, index: int) -> str:
        return str(index - 1) if index else "</s>"

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        """The bytes as text."""
        return b"".join(t.encode() if t == "</s>" else bytes([int(t)]) for t in tokens).decode(
            errors="replace"
        )


@cache
def slow_bytes() -> Any:
    """One `SlowBytes`."""
    return SlowBytes()
