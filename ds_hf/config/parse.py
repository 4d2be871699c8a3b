"""Reads configuration text and remembers the line of every value.

DeepSpeed reads hjson, so besides JSON this takes comments (``//``, ``#``, ``/* */``), trailing and missing commas
at line ends, single quotes, bare keys and bare words. Unlike hjson it reports a duplicate key with both lines, and
never raises anything but ``ConfigError``: nesting is limited, and so is the length of numbers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from ds_hf.config.schema import escape
from ds_hf.errors import ConfigError, Fault

__all__ = ["MAX_DEPTH", "Parsed", "parse"]

MAX_DEPTH = 60
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_BARE_KEY = re.compile(r"[^\s,:\[\]{}\"'#]+")
_BARE_WORD = re.compile(r"(?:(?!\s(?://|#|/\*))[^\n\r,\[\]{}\"])+")
_SPACE = re.compile(r"\s+")
_PLAIN = re.compile(r"[^\"'\\\n]+")  # inside a string
_ESCAPES = {'"': '"', "'": "'", "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_WORDS: dict[str, Any] = {
    "true": True,
    "false": False,
    "null": None,
    "Infinity": float("inf"),
    "-Infinity": float("-inf"),
    "NaN": float("nan"),
}
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}


@dataclass
class Parsed:
    """A parsed text: the value, the line of each pointer, and the duplicate keys."""

    value: Any
    lines: dict[str, int] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)


def parse(text: str, source: str = "config") -> Parsed:
    """Parse ``text``; a syntax error is a ``ConfigError`` with line and column."""
    return _Parser(text.removeprefix("\ufeff"), source).run()


class _Parser:
    def __init__(self, text: str, source: str) -> None:
        self.text = text
        self.source = source
        self.pos = 0
        self.starts = [0, *(m.end() for m in re.finditer("\n", text))]
        self.parsed = Parsed(None)

    def run(self) -> Parsed:
        self.skip()
        if self.pos >= len(self.text):
            raise ConfigError(
                [Fault("", "there is nothing in it", 'write at least {"train_batch_size": 8}')], self.source
            )
        self.parsed.lines[""] = self.line(self.pos)
        self.parsed.value = self.value("", 0)
        self.skip()
        if self.pos < len(self.text):
            raise self.error(
                "there is more text after the end of the value", "remove it, or look for a } too many above"
            )
        return self.parsed

    def line(self, pos: int) -> int:
        low, high = 0, len(self.starts)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.starts[middle] <= pos else (low, middle)
        return low + 1

    def error(self, message: str, fix: str = "", pos: int | None = None) -> ConfigError:
        at = min(self.pos if pos is None else pos, len(self.text))
        line = self.line(at)
        column = at - self.starts[line - 1] + 1
        return ConfigError([Fault("", f"not valid JSON, column {column}: {message}", fix, line)], self.source)

    def skip(self) -> bool:
        """Skip white space and comments; tells whether a line ended on the way."""
        start = self.pos
        while self.pos < len(self.text):
            if match := _SPACE.match(self.text, self.pos):
                self.pos = match.end()
            elif self.text.startswith(("//", "#"), self.pos):
                end = self.text.find("\n", self.pos)
                self.pos = len(self.text) if end < 0 else end
            elif self.text.startswith("/*", self.pos):
                end = self.text.find("*/", self.pos + 2)
                if end < 0:
                    raise self.error("a /* comment is never closed", "close it with */")
                self.pos = end + 2
            else:
                break
        return "\n" in self.text[start : self.pos]

    def value(self, pointer: str, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise self.error(
                f"nested deeper than {MAX_DEPTH} levels", "no section of a configuration is nested that deeply"
            )
        char = self.text[self.pos : self.pos + 1]
        if char == "{":
            return self.object(pointer, depth)
        if char == "[":
            return self.array(pointer, depth)
        if char in ('"', "'"):
            return self.string()
        return self.word()

    def object(self, pointer: str, depth: int) -> dict[str, Any]:
        opened = self.pos
        self.pos += 1
        result: dict[str, Any] = {}
        while True:
            self.skip()
            if self.pos >= len(self.text):
                raise self.error("the text ends inside an object", "close it with }", opened)
            if self.text[self.pos] == "}":
                self.pos += 1
                return result
            line = self.line(self.pos)
            key = self.key()
            here = f"{pointer}/{escape(key)}"
            if key in result:
                first = self.parsed.lines[here]
                message = f'the key "{key[:60]}" appears here and in line {first}'
                self.parsed.faults.append(Fault(here, message, "keep one of the two", line))
            self.parsed.lines[here] = line
            result[key] = self.value(here, depth + 1)
            self.separator("}", "object")

    def key(self) -> str:
        if self.text[self.pos] in ('"', "'"):
            key = self.string()
        elif match := _BARE_KEY.match(self.text, self.pos):
            key = match.group()
            self.pos = match.end()
        else:
            raise self.error(
                f"expected a key, found {self.text[self.pos]!r}", 'a key is a string in quotes: "stage": 2'
            )
        self.skip()
        if self.text[self.pos : self.pos + 1] != ":":
            raise self.error(f'expected ":" after the key "{key[:40]}"', f'write "{key[:40]}": value')
        self.pos += 1
        self.skip()
        if self.pos >= len(self.text):
            raise self.error(f'the key "{key[:40]}" has no value', "give it one, or remove it")
        return key

    def array(self, pointer: str, depth: int) -> list[Any]:
        opened = self.pos
        self.pos += 1
        result: list[Any] = []
        while True:
            self.skip()
            if self.pos >= len(self.text):
                raise self.error("the text ends inside a list", "close it with ]", opened)
            if self.text[self.pos] == "]":
                self.pos += 1
                return result
            here = f"{pointer}/{len(result)}"
            self.parsed.lines[here] = self.line(self.pos)
            result.append(self.value(here, depth + 1))
            self.separator("]", "list")

    def separator(self, close: str, what: str) -> None:
        """After an element: a comma, the end of the line, or the closing bracket must follow."""
        newline = self.skip()
        char = self.text[self.pos : self.pos + 1]
        if char == ",":
            self.pos += 1
        elif char and char != close and not newline:
            raise self.error(
                f"expected , or {close} in this {what}, found {char!r}", "put a comma between the elements"
            )

    def string(self) -> str:
        quote = self.text[self.pos]
        if self.text.startswith("'''", self.pos):
            end = self.text.find("'''", self.pos + 3)
            if end < 0:
                raise self.error("a string is never closed", "close it with '''")
            start, self.pos = self.pos + 3, end + 3
            return self.text[start:end].strip("\n")
        start = self.pos
        self.pos += 1
        pieces: list[str] = []
        while self.pos < len(self.text):
            plain = _PLAIN.match(self.text, self.pos)
            if plain:
                pieces.append(plain.group())
                self.pos = plain.end()
                continue
            char = self.text[self.pos]
            if char == quote:
                self.pos += 1
                # Pairs of \u escapes are one character; a lone half of a pair could not be printed.
                return "".join(pieces).encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            if char == "\n":
                break
            pieces.append(self.escaped() if char == "\\" else char)
            self.pos += 1
        raise self.error("a string is never closed", f"close it with {quote}", start)

    def escaped(self) -> str:
        """The character that a backslash stands for; leaves the position on its last character."""
        self.pos += 1
        char = self.text[self.pos : self.pos + 1]
        if char in _ESCAPES and char:
            return _ESCAPES[char]
        digits = self.text[self.pos + 1 : self.pos + 5]
        if char == "u" and re.fullmatch("[0-9a-fA-F]{4}", digits):
            self.pos += 4
            return chr(int(digits, 16))
        raise self.error("unknown escape in a string", r"write a backslash as \\")

    def word(self) -> Any:
        start = self.pos
        match = _BARE_WORD.match(self.text, start)
        word = match.group().strip() if match else ""
        if not word:
            raise self.error(f"expected a value, found {self.text[start]!r}", "give a value, or remove the key")
        self.pos = match.end() if match else start
        if word in _WORDS:
            return _WORDS[word]
        if word in _PYTHON_WORDS:
            raise self.error(f"{word} is Python, not JSON", f"write {_PYTHON_WORDS[word]}", start)
        if _NUMBER.fullmatch(word):
            return self.number(word, start)
        return word

    def number(self, word: str, start: int) -> int | float:
        if len(word) > 400:
            raise self.error(f"a number with {len(word)} digits", "no setting needs such a number", start)
        return int(word) if re.fullmatch(r"-?[0-9]+", word) else float(word)
