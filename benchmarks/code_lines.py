"""Code lines of each section of the scripts: no blank lines, comments or docstrings.

    python benchmarks/code_lines.py --against 96b6b48

With a commit also those of the scripts as they were there.
"""

import argparse
import ast
import io
import pathlib
import re
import subprocess
import tokenize

ROOT = pathlib.Path(__file__).resolve().parents[1]
IGNORED = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)


def code_lines(text):
    """The numbers of the lines that hold code."""
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in IGNORED and token.string.strip():
            lines |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):  # docstrings, and those of fields
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            if isinstance(node.value.value, str):
                lines -= set(range(node.lineno, node.end_lineno + 1))
    return lines


def sections(text):
    """{banner: number of code lines below it}, in the order of the file."""
    banners = [(1, "Imports")]
    for match in re.finditer(r"^# =+\n# (.+)\n# =+$", text, re.MULTILINE):
        banners.append((text[: match.start()].count("\n") + 1, match[1].split(":")[0]))
    counts = dict.fromkeys((name for _, name in banners), 0)
    for line in code_lines(text):
        counts[[name for start, name in banners if start <= line][-1]] += 1
    return counts


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--against", help="also those of an earlier commit")
    choice = parser.parse_args()
    for path in sorted(ROOT.glob("ppo_*.py")):
        versions = {"now": path.read_text()}
        if choice.against:
            show = ["git", "show", f"{choice.against}:{path.name}"]
            text = subprocess.run(show, cwd=ROOT, capture_output=True, text=True, check=True).stdout
            versions[choice.against] = text
        for version, text in versions.items():
            counts = sections(text)
            parts = ", ".join(f"{name} {count}" for name, count in counts.items())
            print(f"{path.name} {version}: {sum(counts.values())} code lines ({parts})")


if __name__ == "__main__":
    main()
