"""BERT's tokenizer for uncased models: words in lower case without accents, cut into the longest known pieces."""
from __future__ import annotations

import unicodedata
from pathlib import Path

import numpy as np


class WordPiece:
    """Turns sentences into padded ids.

    Args:
        vocabulary (Path): vocab.txt, one piece per line; pieces inside a word start with ``##``.
    """

    def __init__(self, vocabulary: Path):
        self.ids = {piece: i for i, piece in enumerate(vocabulary.read_text(encoding="utf-8").splitlines())}

    def __call__(self, sentences: list[str], longest: int = 128) -> tuple[np.ndarray, np.ndarray]:
        """Ids (B, S) int32 and mask (B, S) float32, 1 = token, padded to the longest of the sentences."""
        rows = []
        for sentence in sentences:
            pieces = [piece for word in words(sentence) for piece in self.pieces(word)][:longest - 2]
            rows.append([self.ids[piece] for piece in ("[CLS]", *pieces, "[SEP]")])
        length = max(map(len, rows))
        ids, mask = np.full((len(rows), length), self.ids["[PAD]"], np.int32), np.zeros((len(rows), length), np.float32)
        for i, row in enumerate(rows):
            ids[i, :len(row)], mask[i, :len(row)] = row, 1
        return ids, mask

    def pieces(self, word: str) -> list[str]:
        found, start = [], 0
        while start < len(word):
            head = "##" if start else ""
            end = next((end for end in range(len(word), start, -1) if head + word[start:end] in self.ids), None)
            if end is None or len(word) > 100:
                return ["[UNK]"]
            found.append(head + word[start:end])
            start = end
        return found


def words(sentence: str) -> list[str]:
    """Words and single signs, in lower case, without accents and control characters."""
    text = "".join(_spaced(c) for c in sentence if c in "\t\n\r" or not _is_control(c))
    text = unicodedata.normalize("NFD", text.lower())
    text = "".join(f" {c} " if _is_sign(c) else c for c in text if unicodedata.category(c) != "Mn")
    return text.split()


def _is_control(c):
    return unicodedata.category(c) in ("Cc", "Cf", "Co", "Cs") or c == "\ufffd"


def _is_sign(c):
    return unicodedata.category(c)[0] == "P" or (c.isascii() and not c.isalnum() and not c.isspace())


def _spaced(c):
    """Chinese characters are words of their own."""
    code = ord(c)
    chinese = (0x4E00 <= code <= 0x9FFF or 0x3400 <= code <= 0x4DBF or 0xF900 <= code <= 0xFAFF
               or 0x20000 <= code <= 0x2CEAF or 0x2F800 <= code <= 0x2FA1F)
    return f" {c} " if chinese else c
