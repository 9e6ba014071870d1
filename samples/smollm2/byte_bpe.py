"""The tokenizer of SmolLM2: pieces of text as UTF-8 bytes, merged pair by pair, and the layout of a chat."""
from __future__ import annotations

import codecs
import re
import unicodedata
from collections.abc import Iterable, Iterator
from itertools import groupby

SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"

# Numbers are cut off before, one by one, so what \w holds besides "_" are letters. The separators \x1c to \x1f are
# white space to Python's \s and not to Unicode.
_SPACE = r"[^\S\x1c-\x1f]"
_PIECE = re.compile(r"'(?:s|t|re|ve|m|ll|d)| ?[^\W_]+| ?(?:[^\s\w]|[_\x1c-\x1f])+|"
                    rf"{_SPACE}+(?![\S\x1c-\x1f])|{_SPACE}+")
_CONTROL = 3    # the type of tokens like <|im_start|>, which no text can spell


class ByteBPE:
    """Turns text into ids and ids into bytes.

    Args:
        tokens (list[str]): The spelling of every id, a byte written as in `byte_signs`.
        merges (list[str]): Pairs "left right", the most urgent first.
        kinds (list[int]): The type of every id.
    """

    def __init__(self, tokens: list[str], merges: list[str], kinds: list[int]):
        self.signs = byte_signs()
        bytes_of = {sign: byte for byte, sign in enumerate(self.signs)}
        self.control = {token: i for i, (token, kind) in enumerate(zip(tokens, kinds)) if kind == _CONTROL}
        self.ids = {token: i for i, token in enumerate(tokens) if token not in self.control}
        self.ranks = {tuple(pair.split(" ")): rank for rank, pair in enumerate(merges)}
        self.spelled = [b"" if token in self.control else bytes(bytes_of[sign] for sign in token) for token in tokens]
        self.end = self.control["<|im_end|>"]

    def encode(self, text: str) -> list[int]:
        """Ids of `text`. Control tokens that are spelled in it are text like any other."""
        return [self.ids[part] for piece in pieces(text)
                for part in self._merged([self.signs[byte] for byte in piece.encode("utf-8")])]

    def decode(self, ids: Iterable[int]) -> str:
        """The text that `ids` spell, without control tokens."""
        return b"".join(self.spelled[i] for i in ids).decode("utf-8", errors="replace")

    def stream(self, ids: Iterable[int]) -> Iterator[str]:
        """The same as it comes, one text per id, a character only once all of its bytes are there."""
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        for i in ids:
            yield decoder.decode(self.spelled[i])
        yield decoder.decode(b"", final=True)

    def turn(self, role: str, text: str) -> list[int]:
        """One message of a chat."""
        start = [self.control["<|im_start|>"]]
        return [*start, *self.encode(f"{role}\n{text}"), self.end, *self.encode("\n")]

    def answer(self) -> list[int]:
        """What the model's own message begins with."""
        return [self.control["<|im_start|>"], *self.encode("assistant\n")]

    def chat(self, text: str, system: str = SYSTEM) -> list[int]:
        """A first question, laid out as the model was trained to answer it."""
        return [*self.turn("system", system), *self.turn("user", text), *self.answer()]

    def _merged(self, parts):
        while len(parts) > 1:
            pairs = list(zip(parts, parts[1:]))
            best = min(pairs, key=lambda pair: self.ranks.get(pair, len(self.ranks)))
            if best not in self.ranks:
                break
            merged, i = [], 0
            while i < len(parts):
                both = i + 1 < len(parts) and (parts[i], parts[i + 1]) == best
                merged.append("".join(best) if both else parts[i])
                i += 1 + both
            parts = merged
        return parts


def pieces(text: str) -> list[str]:
    """The parts of `text` across which nothing merges: single numerals, words, signs, white space."""
    runs = [(numeral, list(run)) for numeral, run in groupby(text, lambda c: unicodedata.category(c)[0] == "N")]
    return [piece for numeral, run in runs for piece in (run if numeral else _PIECE.findall("".join(run)))]


def byte_signs() -> list[str]:
    """The printable character that stands for each byte in the vocabulary: its own where it has one."""
    own = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in own else chr(next(others)) for byte in range(256)]
