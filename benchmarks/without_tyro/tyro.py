"""In tyro's place where it is not installed: --name value, --name=value, --name and --no-name."""

import ast
import dataclasses
import sys


class conf:
    Fixed = list  # only annotates


def cli(kind, args=None, default=None):
    """An instance of a dataclass, by default kind(), with the fields that a command line sets."""
    default, words = default or kind(), list(sys.argv[1:] if args is None else args)
    fields = {}
    while words:
        word, equals, text = words.pop(0).partition("=")
        name = word.removeprefix("--").replace("-", "_")
        if isinstance(getattr(default, name.removeprefix("no_")), bool):
            fields[name.removeprefix("no_")] = not name.startswith("no_")
            continue
        text = text if equals else words.pop(0)
        try:
            value = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            value = text
        fields[name] = float(value) if isinstance(getattr(default, name), float) else value
    return dataclasses.replace(default, **fields)
