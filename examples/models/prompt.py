"""What goes into a model: text by the folder's tokenizer, or random tokens."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from .errors import InputError

RANDOM_TOKENS = 512


@dataclasses.dataclass(frozen=True)
class Prompt:
    tokens: list[int]
    tokenizer: Any = None

    def text_of(self, token: int) -> str:
        """A token's text; nothing without a tokenizer."""
        return repr(self.tokenizer.decode([token])) if self.tokenizer else ""


def read_prompt(
    folder: Path,
    vocabulary: int,
    *,
    text: str | None = None,
    file: Path | None = None,
    length: int | None = None,
) -> Prompt:
    """The tokens of `text` or of a file's text, or random ones where neither is given.

    Args:
      folder: where tokenizer.json is.
      vocabulary: how many tokens the model knows.
      text: the prompt.
      file: a file of it, in UTF-8.
      length: how many of its tokens are taken; all by default.

    Raises:
      InputError: for a prompt without a tokenizer, or of fewer tokens.
    """
    tokenizer = _tokenizer(folder)
    if file is not None:
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeError) as error:
            raise InputError(f"the prompt cannot be read: {error}") from None
    if text is None:
        random = np.random.default_rng(0)
        tokens = random.integers(vocabulary, size=length or RANDOM_TOKENS)
        return Prompt(tokens.tolist(), tokenizer)
    if tokenizer is None:
        raise InputError(
            f"a prompt of text takes a tokenizer.json, which is not in {folder}; "
            "--tokens N without a prompt takes random tokens"
        )
    tokens = tokenizer.encode(text).ids
    if len(tokens) < (length or 1):
        raise InputError(
            f"the prompt has {len(tokens)} tokens, {length or 1} asked for"
        )
    tokens = tokens[:length]
    if max(tokens) >= vocabulary:
        raise InputError(
            f"tokenizer.json gives token {max(tokens)}; the model knows {vocabulary}"
        )
    return Prompt(tokens, tokenizer)


def _tokenizer(folder: Path) -> Any:
    """The folder's tokenizer, or None where there is none."""
    path = folder / "tokenizer.json"
    if not path.exists():
        return None
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises no other
        raise InputError(f"{path} cannot be read: {error}") from None
