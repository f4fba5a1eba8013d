"""Counts the code lines of the scripts by section, and of tests and benchmarks.

    python benchmarks/code_lines.py --against 5c746eb

Blank lines, comments and docstrings do not count. `--against` adds the counts of an earlier commit.
"""

import argparse
import ast
import io
import pathlib
import re
import subprocess
import tokenize

ROOT = pathlib.Path(__file__).resolve().parents[1]
FOLDERS = ("", "tests/", "benchmarks/")
IGNORED = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)


def code_lines(text):
    """Returns the set of line numbers with code."""
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in IGNORED and token.string.strip():
            lines |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):  # docstrings, also of fields
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            if isinstance(node.value.value, str):
                lines -= set(range(node.lineno, node.end_lineno + 1))
    return lines


def sections(text):
    """Returns {banner: number of code lines below it}, in the order of the file."""
    banners = [(1, "Imports")]
    for match in re.finditer(r"^# =+\n# (.+)\n# =+$", text, re.MULTILINE):
        banners.append((text[: match.start()].count("\n") + 1, match[1].split(":")[0]))
    counts = dict.fromkeys((name for _, name in banners), 0)
    for line in code_lines(text):
        counts[[name for start, name in banners if start <= line][-1]] += 1
    return counts


def files_at(commit):
    """Returns {path: text} of the Python files in the work tree or at a commit."""
    if commit is None:
        paths = [path for folder in FOLDERS for path in ROOT.glob(f"{folder}*.py")]
        return {str(path.relative_to(ROOT)): path.read_text() for path in sorted(paths)}

    def git(*words):
        command = ["git", *words]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout

    names = git("ls-tree", "--name-only", commit, *(folder for folder in FOLDERS if folder), "./")
    names = [name for name in names.splitlines() if name.endswith(".py")]
    return {name: git("show", f"{commit}:{name}") for name in sorted(names)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--against", help="earlier commit to compare with")
    choice = parser.parse_args()
    versions = {"now": files_at(None)}
    if choice.against:
        versions[choice.against] = files_at(choice.against)
    for name in [name for name in versions["now"] if name.startswith("ppo_")]:
        for version, files in versions.items():
            if name in files:
                counts = sections(files[name])
                parts = ", ".join(f"{section} {count}" for section, count in counts.items())
                print(f"{name} {version}: {sum(counts.values())} code lines ({parts})")
    for group, start in {"scripts": "ppo_", "tests": "tests/", "benchmarks": "benchmarks/"}.items():
        for version, files in versions.items():
            texts = [text for name, text in files.items() if name.startswith(start)]
            lines, code = (
                sum(text.count("\n") for text in texts),
                sum(len(code_lines(x)) for x in texts),
            )
            print(f"{group} {version}: {len(texts)} files, {lines} lines, {code} code lines")


if __name__ == "__main__":
    main()
