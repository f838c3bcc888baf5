"""What the transformers of this interpreter loads; a program of its own, for other releases.

Reads paths of directories, one a line, and prints what it loads of each as a line of JSON.
"""

import json
import sys
from typing import Any

FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def loaded(directory: str, text: str) -> dict[str, Any]:
    """The tokens of a directory's tokenizer, and the ids of a text; or the error's name."""
    from transformers import AutoTokenizer  # a second, which collecting tests need not take

    try:
        tokenizer = AutoTokenizer.from_pretrained(directory)
        added = [
            [number, one.content, *(getattr(one, flag) for flag in FLAGS)]
            for number, one in sorted(tokenizer.added_tokens_decoder.items())
        ]
        named = {name: text for name, text in tokenizer.special_tokens_map.items() if text}
        ids = tokenizer.encode(text, add_special_tokens=False)
    except Exception as error:  # noqa: BLE001 - whatever it raises, it does not load
        return {"error": type(error).__name__}
    return {"added": added, "named": named, "ids": ids}


if __name__ == "__main__":
    for line in sys.stdin.read().splitlines():
        print(json.dumps(loaded(line, sys.argv[1])))
