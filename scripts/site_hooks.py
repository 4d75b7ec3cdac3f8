"""What MkDocs cannot do by itself for the documentation site (mkdocs.yml): `make docs` runs these hooks.

- Links out of docs/ (../CHANGELOG.md, ../benchmarks/results/checkpoint.json) work in the repository and on the site:
  pages are taken along, other files are copied.
- Commands, flags and the Python interface are written by the package itself, where a page has a marker.
- Notebooks in examples/ are pages under tutorials/, with the outputs that are stored in them.
- Names of files in sentences, such as docs/theory.md section 9, are links to pages.
- The gallery's pages of the demo are made for each build (scripts/gallery.py).
- Lists and tables directly under a paragraph are what they look like, as everywhere but in Python-Markdown.
- A built page that would load something from another host is an error.
"""

from __future__ import annotations

import ast
import atexit
import os
import posixpath
import re
import shutil
import sys
import tempfile
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import File, Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
HERE = [str(ROOT / "src"), str(ROOT / "scripts")]
sys.path[:0] = HERE  # this tree, not another one that is installed

from site_notebooks import page_of  # noqa: E402

PAGES = ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")  # pages of the site that are not in docs/
START = {"README.md": "index.md"}  # what stands for them on the site
NOTEBOOKS = {path.name: f"tutorials/{path.stem}.md" for path in sorted((ROOT / "examples").glob("*.ipynb"))}
LINK = re.compile(r'(\]\(|src="|href=")(?![a-z]+:)([^)\s"#]+)')  # to a file; not to an address or a heading
PICTURES = re.compile(r"(?m)^!\[[^]]*\]\([^)]*\) !\[")  # several in one paragraph
FILE = re.compile(r"(?<![\w/\[])(?<!\]\()docs/([\w/-]+)\.md(?:,? section (\d+))?(?!\w)")  # its name in a sentence
EXTERNAL = re.compile(r"""<(?:script|img|iframe|link)\b[^>]*?\b(?:src|href)=["']?(?:https?:)?//[^>]*>|@import[^;]*//""")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Fill the entries of the nav that have a * in them: pages by the names of their files, plans of runs last."""
    sys.path[:0] = HERE  # MkDocs takes back what the import of this file changed
    docs = Path(config.docs_dir)
    pages = sorted(path.relative_to(docs).as_posix() for path in docs.rglob("*.md"))
    config.nav = _fill(config.nav, set(pages) - set(_names(config.nav)))
    return config


def _names(nav: Any) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    return [name for part in (nav.values() if isinstance(nav, dict) else nav) for name in _names(part)]


def _fill(nav: list[Any], rest: set[str]) -> list[Any]:
    filled: list[Any] = []
    for entry in nav:
        title, value = next(iter(entry.items())) if isinstance(entry, dict) else (None, entry)
        if isinstance(value, list):
            filled.append({title: _fill(value, rest)})
        elif "*" in value:
            folder = posixpath.dirname(value)
            names = (name for name in rest if posixpath.dirname(name) == folder and fnmatch(name, value))
            in_order = sorted(names, key=lambda name: (name.endswith("-plan.md"), name))
            pages = [{_title(name): name} for name in in_order]
            filled += [{title: pages}] if title and pages else pages
        else:
            filled.append(entry)
    return filled


def _title(name: str) -> str:
    """What the nav calls a page: its heading, of a paper its name and the heading up to the colon."""
    stem, first = Path(name).stem, (ROOT / "docs" / name).read_text(encoding="utf-8").partition("\n")[0]
    heading = first.removeprefix("# ")
    if stem.endswith("-plan"):
        return heading
    title = heading.partition(":")[0]
    return f"{stem}: {title}" if re.fullmatch(r"[a-z]+\d{4}", stem) else title


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not in docs/, and every file outside docs/ that a page links to."""
    from mkdocs.structure.files import File

    for name in PAGES:
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    for name, uri in NOTEBOOKS.items():
        text, pictures = page_of(ROOT / "examples" / name)
        files.append(File.generated(config, uri, content=text))
        for picture, content in pictures.items():
            files.append(File.generated(config, f"tutorials/{picture}", content=content))
    for path in sorted(_gallery().glob("*.html")):
        files.append(File.generated(config, f"gallery/{path.name}", abs_src_path=str(path)))
    for page in files.documentation_pages():
        for _, target in LINK.findall(page.content_string):
            path = _outside(page, target)
            if path is not None and path not in (*PAGES, *START) and (ROOT / path).is_file():
                if Path(path).name in NOTEBOOKS and page.src_uri not in NOTEBOOKS.values():
                    continue  # its page; the file itself is linked from there
                name = f"files/{path}"
                if files.get_file_from_path(name) is None:
                    files.append(File.generated(config, name, abs_src_path=str(ROOT / path)))
    return files


@cache
def _gallery() -> Path:
    """A folder with the gallery of the package's models; made once, also where pages are built again and again."""
    from gallery import gallery

    from locater_lab.studies.kinds_of_heads.exhibits import packaged_models

    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    gallery(packaged_models(), Path(folder), tokens=1024)
    return Path(folder)


def _place(page: File) -> str:
    """Where a page is in the repository."""
    if page.src_uri in NOTEBOOKS.values():
        return f"examples/{posixpath.basename(page.src_uri)}"
    return page.src_uri if page.src_uri in PAGES else f"docs/{page.src_uri}"


def _outside(page: File, target: str) -> str | None:
    """The path in the repository that a link leads to, where that is not in docs/."""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(_place(page)), target))
    return None if path.startswith("docs/") or path == "docs" else path


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Mend links and lists, fill in what the package says of itself, and let a search find guides before results."""
    page.meta.setdefault("search", {"boost": 0.5 if re.match(r"results/|log\.|CHANGELOG", page.file.src_uri) else 2})
    if PICTURES.search(markdown):
        page.meta.setdefault("hide", ["toc"])  # room for pictures side by side
    markdown = _page_names(_blocks(markdown), page.file.src_uri)
    markdown = LINK.sub(lambda found: found[1] + _target(page.file, found[2]), markdown)
    for marker, written in (("commands", _commands), ("gallery", _shown)):
        if f"<!-- {marker} -->" in markdown:
            markdown = markdown.replace(f"<!-- {marker} -->", written())
    return re.sub(r"<!-- api ([\w.]+) -->", lambda found: _interface(found[1]), markdown)


def _target(page: File, target: str) -> str:
    path, notebook = _outside(page, target), page.src_uri in NOTEBOOKS.values()
    if path is None and page.src_uri not in PAGES and not notebook:
        return target
    if notebook and "/" not in target:  # a picture that was made with the page
        return target
    if path is None:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(_place(page)), target)).removeprefix("docs/")
    elif posixpath.basename(path) in NOTEBOOKS and not notebook:
        path = NOTEBOOKS[posixpath.basename(path)]
    else:
        path = START.get(path, path if path in PAGES else f"files/{path}")
    return posixpath.relpath(path, posixpath.dirname(page.src_uri) or ".")


def _blocks(markdown: str) -> str:
    """Put an empty line between a paragraph and the list or table under it, and four spaces before lists in lists."""
    lines, fenced = [], False
    text = markdown.split("\n")
    for line, after in zip(text, [*text[1:], ""], strict=True):
        fenced ^= line.lstrip().startswith("```")
        before = lines[-1] if lines else ""
        item = re.match(r"- |\d+\. ", line) and not re.match(r"\s|- |\d+\. ", before)
        table = line.startswith("|") and after.startswith("|--") and not before.startswith("|")
        if (item or table) and before.strip() and not fenced:
            lines.append("")
        nested = re.match(r" {2,3}(?=(- |\d+\. ))", line)
        lines.append("    " + line.lstrip() if nested and not fenced else line)
    return "\n".join(lines)


def _page_names(markdown: str, page: str) -> str:
    """Names of files in sentences as links: docs/theory.md section 9, and [theory.md](theory.md) without its ending.
    Code is left alone.
    """
    lines, fenced = [], False
    for line in markdown.split("\n"):
        fenced ^= line.lstrip().startswith("```")
        if not fenced and not line.startswith("    "):
            parts = re.split(r"(`[^`]*`)", line)  # every second one is code
            parts[::2] = [FILE.sub(lambda found: _page_name(found, page), part) for part in parts[::2]]
            line = re.sub(r"\[([\w/-]+)\.md\]\(", lambda found: f"[{posixpath.basename(found[1])}](", "".join(parts))
        if line.startswith("|"):  # counts such as 8 / 0 / 1 stay on one line
            line = re.sub(r"(?<=\d) / (?=\d)", "\u00a0/\u00a0", line)
        lines.append(line)
    return "\n".join(lines)


def _page_name(found: re.Match[str], page: str) -> str:
    name, section = found[1], found[2]
    path = ROOT / "docs" / f"{name}.md"
    if page in PAGES or not path.is_file():
        return found[0]
    target, words = posixpath.relpath(f"{name}.md", posixpath.dirname(page) or "."), posixpath.basename(name)
    if section:
        heading = re.search(rf"(?m)^## ({section}\..*)$", path.read_text(encoding="utf-8"))
        words += f", section {section}"
        target += "" if heading is None else "#" + re.sub(r"[^\w\- ]", "", heading[1].lower()).replace(" ", "-")
    return f"[{words}]({target})"


def _commands() -> str:
    """Every command as its own --help describes it."""
    import typer.main

    from locater.cli import load_offered_commands

    group: Any = typer.main.get_command(load_offered_commands())
    top = group.make_context("locater", ["demo"], resilient_parsing=True)
    parts = [_command("locater", group, top)]
    for name in group.list_commands(top):
        _, command, _ = group.resolve_command(top, [name])
        parts.append(_command(name, command, command.make_context(name, [], parent=top, resilient_parsing=True)))
    return "\n\n".join(parts)


def _command(name: str, command: Any, context: Any) -> str:
    title = name if name == "locater" else f"locater {name}"
    usage = " ".join(command.get_usage(context).removeprefix("Usage:").split())
    rows = [record for param in command.get_params(context) if (record := param.get_help_record(context))]
    table = "\n".join(f"| `{_cell(names.strip())}` | {_plain(_cell(words))} |" for names, words in rows)
    examples = "\n".join(line for line in (command.epilog or "").split("\n") if line and line != "Examples:")
    table = f"| argument or option | meaning |\n|---|---|\n{table}"
    return f"## {title}\n\n{command.help}\n\n```text\n{usage}\n```\n\n{table}\n\n```sh\n{examples}\n```"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def _plain(text: str) -> str:
    """Stars and underscores of a help text are what they are, as in 'run/step-*', and no emphasis."""
    return re.sub(r"([*_])", r"\\\1", text)


def _shown() -> str:
    """Links to the pages of the gallery."""
    pages = {
        "index": "all of it, by cards",
        "demo-scan": "a scan of the demo: what its weights say",
        "demo-probe": "a probe of the demo: what its heads do on text",
        "twin-probe": "a probe of its twin, trained with LocAteR",
        "demo-twin": "the two compared",
    }
    return "\n".join(f"- [{words[0].upper()}{words[1:]}](gallery/{name}.html)" for name, words in pages.items())


def _interface(module: str) -> str:
    """A directive of mkdocstrings for each public name of a module, functions first."""
    folder = ROOT / "src" / Path(*module.split("."))
    file = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    text = file.read_text(encoding="utf-8")
    public = next(
        ast.literal_eval(node.value)
        for node in ast.parse(text).body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) == "__all__"
    )
    rooms = {path.stem for path in file.parent.iterdir()} if module == "locater" else set()
    rooms |= {path.stem for path in file.parent.glob("*.py") if f"from {module} import {path.stem}\n" in text}
    names = [name for name in public if name not in rooms and not name.startswith("__")]
    constants = ", ".join(f"`{name}`" for name in names if name.isupper())
    functions_first = sorted((name for name in names if not name.isupper()), key=lambda name: name[0].isupper())
    directives = [f"::: {module}.{name}" for name in functions_first]
    return "\n\n".join(([f"Constants: {constants}."] if constants else []) + directives)


def on_post_build(config: MkDocsConfig) -> None:
    """A page that loads a script, a style or a picture from elsewhere does not work offline."""
    from mkdocs.exceptions import PluginError

    for folder, _, names in os.walk(config.site_dir):
        for path in (Path(folder, name) for name in names if name.endswith((".html", ".css"))):
            loaded = [
                x[0] for x in EXTERNAL.finditer(path.read_text(encoding="utf-8")) if 'rel="canonical"' not in x[0]
            ]
            if loaded:
                raise PluginError(f"{path}: loads from another host: {loaded[0]:.200}")
