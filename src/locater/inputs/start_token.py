"""A start token in front of every sequence, beside the tokens of any tokenizer."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from locater.inputs.tokenizer import Tokenizer

START = "<bos>"


class StartTokenizer:
    """A tokenizer with one more token, `start`. `encode` returns only the tokens of the text: whoever cuts them into
    sequences puts `start` in front of each. The saved tokenizer puts it in front of a text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self.start, self.size = tokenizer, tokenizer.size, tokenizer.size + 1

    def encode(self, text: str) -> Tensor:
        return self._tokenizer.encode(text)

    def to_json(self) -> str:
        document = json.loads(self._tokenizer.to_json())
        kind = {"special": True, "normalized": False, "single_word": False, "lstrip": False, "rstrip": False}
        document["added_tokens"].append({"id": self.start, "content": START, **kind})
        document["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [_special(), _text("A", 0)],
            "pair": [_special(), _text("A", 0), _text("B", 1)],
            "special_tokens": {START: {"id": START, "ids": [self.start], "tokens": [START]}},
        }
        return json.dumps(document)


def without_start(text: str) -> str:
    """A saved tokenizer without its start token; unchanged if it has none."""
    document = json.loads(text)
    others = [token for token in document["added_tokens"] if token["content"] != START]
    if len(others) == len(document["added_tokens"]):
        return text
    return json.dumps({**document, "added_tokens": others, "post_processor": None})


def _special() -> dict[str, Any]:
    return {"SpecialToken": {"id": START, "type_id": 0}}


def _text(name: str, kind: int) -> dict[str, Any]:
    return {"Sequence": {"id": name, "type_id": kind}}
