"""Mutants of the Ascend C kernels, all of them in one build: each altered place asks at run time if it is its turn.

Compiling a kernel takes longer than running it on a small problem, so the sources are rewritten once. Places are found
by their text, so that the tool follows the kernels.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

# Statements that order things. Functions that also move data (SetUp, Store) are mutated inside, statement by statement.
SYNC = r"(?:AscendC::)?(?:SetFlag|WaitFlag|PipeBarrier|CrossCoreSetFlag|CrossCoreWaitFlag|SyncAll)\b"
QUEUE = r"\w+(?:\.|->)(?:template\s+)?EnQue\b"
WRAPPER = r"\w+(?:\.|->)(?:template\s+)?(?:Wait|Signal|DeQue)\w*"
# Statements that move or compute: without one of them the result is wrong or undefined.
MOVES = "DataCopy|DataCopyPad|LoadData|LoadDataWithTranspose|Fixpipe|Mmad|CopyIn|CopyOut|CopyRows|LoadLeft|LoadRight"
FILLS = "ClearTail|Fill|FillColumns|FillLanes"
FEEDS = "Duplicate|Brcb|Spread"
# Which arguments of a parameter struct are strides or sizes.
STRIDES = {
    "BinaryRepeatParams": (3, 4, 5),
    "UnaryRepeatParams": (2, 3),
    "BrcbRepeatParams": (1,),
    "LoadData2DParams": (2,),
    "DataCopyExtParams": (1, 2, 3),
    "FixpipeParamsV220": (2, 3),
    "Nd2NzParams": (4, 5),
}
# A pair that the same core has, and that orders something else.
OTHER_PAIR = {
    "MTE2_MTE1": "MTE2_M",
    "MTE1_MTE2": "MTE1_FIX",
    "MTE1_M": "MTE1_MTE2",
    "M_MTE1": "M_MTE2",
    "M_FIX": "M_MTE2",
    "FIX_M": "FIX_MTE1",
    "MTE2_V": "MTE2_MTE3",
    "V_MTE2": "V_S",
    "V_MTE3": "V_MTE2",
    "MTE3_V": "MTE3_MTE2",
    "MTE3_MTE2": "MTE3_V",
    "MTE2_MTE3": "MTE2_V",
    "V_S": "V_MTE2",
    "S_V": "S_MTE2",
    "MTE2_S": "MTE2_V",
    "S_MTE2": "S_V",
    "S_MTE3": "S_V",
    "MTE3_S": "MTE3_V",
}
HEADER = "ms_mutation.h"
HEADER_TEXT = """#pragma once
namespace ms_mutation {
constexpr int kMost = 4096;
inline int mutant = -1, mute = 0;
inline long hits[kMost] = {};
inline bool Live(int k) { return ++hits[k], mutant != k && mute == 0; }
inline bool Chosen(int k) { return ++hits[k], mutant == k; }
struct Mute {
  int by;
  explicit Mute(int k) : by(Chosen(k)) { mute += by; }
  ~Mute() { mute -= by; }
};
template <class F>
decltype(auto) Muted(int k, F f) {
  Mute quiet(k);
  return f();
}
template <class T>
T More(int k, T x) {
  return Chosen(k) ? T(x + 1) : x;
}
template <class T>
T Half(int k, T x) {
  return Chosen(k) ? T(x / 2) : x;
}
}  // namespace ms_mutation
"""
CONTROL_TEXT = """#include "ms_mutation.h"
#define EXPORT extern "C" __attribute__((visibility("default")))
EXPORT void ms_mutation_set(int k) { ms_mutation::mutant = k, ms_mutation::mute = 0; }
EXPORT long* ms_mutation_hits() { return ms_mutation::hits; }
"""


class Mutant(NamedTuple):
    number: int
    kind: str
    file: str
    line: int
    function: str
    text: str

    def __str__(self):
        return f"{self.file}:{self.line}: {self.function}: {self.kind}: {self.text}"


def blank(text):
    """The text with comments and string literals as blanks of the same length, new lines kept."""
    pattern = r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|^[ \t]*#(?:\\\n|[^\n])*'
    hide = lambda match: re.sub(r"[^\n]", " ", match.group())
    return re.sub(pattern, hide, text, flags=re.S | re.M)


def closing(text, at):
    """Index of the bracket that closes the one at `at`."""
    pairs = {"(": ")", "{": "}", "[": "]"}
    depth = 0
    for index in range(at, len(text)):
        if text[index] in pairs:
            depth += 1
        elif text[index] in pairs.values():
            depth -= 1
            if depth == 0:
                return index
    raise ValueError(f"unbalanced bracket: {text[at : at + 60]!r}")


def _call_end(text, at):
    """One past the `)` of the call whose name ends at `at`, template arguments included; None if it is no call."""
    match = re.compile(r"\s*(<[^;(){}]*>)?\s*\(").match(text, at)
    return closing(text, match.end() - 1) + 1 if match else None


def _arguments(text, start, end):
    """(start, end) of each argument between two brackets."""
    spans, depth, first = [], 0, start
    for index in range(start, end):
        if text[index] in "([{":
            depth += 1
        elif text[index] in ")]}":
            depth -= 1
        elif text[index] == "," and depth == 0:
            spans.append((first, index))
            first = index + 1
    return [*spans, (first, end)] if text[start:end].strip() else []


def _begins_statement(text, at):
    before = text[:at].rstrip()
    if before.endswith(("else", "do")):
        return True
    if not before.endswith(")"):
        return before.endswith((";", "{", "}"))
    # `if (...) X;` and `for (...) X;` are statements, `f(a) X` is none.
    depth = 0
    for index in range(len(before) - 1, -1, -1):
        depth += {")": 1, "(": -1}.get(before[index], 0)
        if depth == 0:
            return bool(re.search(r"\b(?:if|for|while|constexpr)\s*$", before[:index]))
    return False


class Rewriter:
    """One source file: collects edits, and the mutants they stand for."""

    def __init__(self, path, first):
        self.path, self.text = path, path.read_text()
        self.code = blank(self.text)
        self.first, self.mutants, self._edits = first, [], []

    def _new(self, kind, start, end):
        number = self.first + len(self.mutants)
        line = self.text.count("\n", 0, start) + 1
        shown = " ".join(self.text[start:end].split())
        self.mutants.append(Mutant(number, kind, self.path.name, line, self._function(start), shown[:100]))
        return number

    def _function(self, at):
        """Name of the function around a place."""
        heads = list(re.finditer(r"__aicore__ inline [^;{}()]*?(\w+)\(", self.code[:at]))
        return heads[-1].group(1) if heads else self.path.stem

    def _edit(self, start, end, before, after):
        self._edits.append((start, end, before, after))

    def _statements(self, pattern):
        """(start, end) of the statements that consist of one call matching `pattern`."""
        for match in re.finditer(rf"(?<![\w.>:]){pattern}", self.code):
            end = _call_end(self.code, match.end())
            if end and self.code[end:].lstrip().startswith(";") and _begins_statement(self.code, match.start()):
                yield match.start(), self.code.index(";", end) + 1

    def drop(self, kind, pattern):
        for start, end in self._statements(pattern):
            number = self._new(kind, start, end)
            self._edit(start, end, f"{{ if (ms_mutation::Live({number})) ", " }")

    def mute_calls(self):
        """Calls of functions that only synchronise: everything they would do is left out, for this call."""
        for match in re.finditer(rf"(?<![\w.>:]){WRAPPER}", self.code):
            end = _call_end(self.code, match.end())
            if not end:
                continue
            number = self._new("call", match.start(), end)
            before = f"ms_mutation::Muted({number}, [&]() -> decltype(auto) {{ return "
            self._edit(match.start(), end, before, "; })")

    def alter(self, kind, function, start, end):
        number = self._new(kind, start, end)
        self._edit(start, end, f"ms_mutation::{function}({number}, ", ")")

    def strides(self):
        for name, all_of_them in STRIDES.items():
            for match in re.finditer(rf"\b{name}\b(?:<[^;(){{}}]*>)?(?:\s+\w+)?\s*[({{]", self.code):
                which = all_of_them
                end = closing(self.code, match.end() - 1)
                spans = _arguments(self.code, match.end(), end)
                if name == "DataCopyExtParams" and spans and self.code[slice(*self._trim(*spans[0]))] == "1":
                    which = (1,)  # a single burst has no stride
                if name == "Nd2NzParams" and len(spans) > 1 and self.code[slice(*self._trim(*spans[1]))] == "1":
                    which = (5,)  # a single row has no pitch
                for index in which:
                    # One argument is a copy, and a declared parameter has a name beside its type.
                    if index < len(spans) and len(spans) > 2 and "&" not in self.code[match.end() : end]:
                        self.alter(f"{name} argument {index} + 1", "More", *self._trim(*spans[index]))

    def _trim(self, start, end):
        while self.code[start].isspace():
            start += 1
        while self.code[end - 1].isspace():
            end -= 1
        return start, end

    def event_ids(self):
        for match in re.finditer(r"\b(?:SetFlag|WaitFlag)<HardEvent::\w+>\(", self.code):
            self.alter("event id + 1", "More", match.end(), closing(self.code, match.end() - 1))

    def event_pairs(self):
        """SetFlag and WaitFlag that follow each other, both of another pair of pipes."""
        pattern = r"SetFlag<HardEvent::(\w+)>\(([^;]*)\);\s*WaitFlag<HardEvent::\1>\(([^;]*)\);"
        for match in re.finditer(pattern, self.code):
            pair = match.group(1)
            if pair not in OTHER_PAIR:
                continue
            number = self._new(f"pair {OTHER_PAIR[pair]}", match.start(), match.end())
            other = match.group().replace(f"HardEvent::{pair}", f"HardEvent::{OTHER_PAIR[pair]}")
            other = " ".join(other.split())
            self._edit(match.start(), match.end(), f"if (ms_mutation::Chosen({number})) {{ {other} }} else {{ ", " }")

    def buffers(self):
        """Half of the bytes of a ring of buffers."""
        for match in re.finditer(r"\w+\.SetUp\(", self.code):
            spans = _arguments(self.code, match.end(), closing(self.code, match.end() - 1))
            if len(spans) == 4:
                self.alter("half the buffer", "Half", *self._trim(*spans[1]))

    def rewritten(self):
        """The text with all edits; edits may nest, an outer one starts no later and ends no earlier."""
        inserts = []
        for order, (start, end, before, after) in enumerate(self._edits):
            inserts.append((start, 1, -end, order, before))
            inserts.append((end, 0, -start, -order, after))
        out, at = [], 0
        for position, *_, what in sorted(inserts, key=lambda item: item[:4]):
            out += [self.text[at:position], what]
            at = position
        return f'#include "{HEADER}"\n#line 1 "{self.path}"\n' + "".join(out) + self.text[at:]


def rewrite(source, target):
    """Writes mutable copies of the kernels in `source` into `target`. Returns (sync mutants, further mutants)."""
    target = Path(target)
    target.mkdir(parents=True, exist_ok=True)
    sync, further = [], []
    for path in sorted([*Path(source).glob("*.h"), *Path(source).glob("*.cpp")]):
        file = Rewriter(path, len(sync) + len(further))
        file.drop("statement", SYNC)
        file.drop("statement", QUEUE)
        file.mute_calls()
        sync += file.mutants
        count = len(file.mutants)
        for names, kind in ((MOVES, "no copy"), (FILLS, "no padding"), (FEEDS, "nothing written")):
            file.drop(kind, rf"(?:AscendC::)?(?:{names})\b")
        file.strides()
        file.event_ids()
        file.event_pairs()
        file.buffers()
        further += file.mutants[count:]
        _write(target / path.name, file.rewritten())
    _write(target / HEADER, HEADER_TEXT)
    _write(target / "ms_mutation.cpp", CONTROL_TEXT)
    for old in target.iterdir():
        if old.name not in {HEADER, "ms_mutation.cpp"} and not (Path(source) / old.name).exists():
            old.unlink()
    return sync, further


def _write(path, text):
    if not path.exists() or path.read_text() != text:
        path.write_text(text)
