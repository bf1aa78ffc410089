"""What mkdocs does beside its own work: equations as MathML, pages from files outside docs/, tables from schemas.

- `$...$` and `$$...$$` become MathML here, so a reader's browser fetches no library for them.
- A link that leaves docs/ (to CONTRIBUTING.md, benchmarks/LOG.md, a recipe) works in a clone and on a code host; the
  site brings the file in under project/ and points the link there.
- `<!-- schema: plan -->` becomes a table of that schema's fields, and quickstart.ipynb a page, to which its links lead.
"""

from __future__ import annotations

import json
import posixpath
import re
from html import unescape
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files

DOCS = Path(__file__).parents[1]
ROOT = DOCS.parent
BROUGHT = "project"
PROJECT_PAGES = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "benchmarks/LOG.md", "benchmarks/README.md")
NOTEBOOK, NOTEBOOK_PAGE = DOCS / "quickstart.ipynb", "start/notebook.md"
_LINK = re.compile(r"(\]\()([^)\s#]+)([^)]*\))")
_CODE = re.compile(r"(^```.*?^```|`[^`\n]+`)", re.M | re.S)
_MATHS = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.S)
_SCHEMA = re.compile(r"<!-- schema: (\w+) -->")


def on_files(files: Files, config: Any) -> Files:
    """Bring in the pages of the project, whatever they and the docs link to, and the notebook as a page."""
    pages = {f"docs/{file.src_uri}": Path(str(file.abs_src_path)).read_text() for file in files.documentation_pages()}
    waiting = [*PROJECT_PAGES, *(target for page, text in pages.items() for target in _outside(page, text))]
    brought: set[str] = set()
    while waiting:
        path = waiting.pop()
        if path in brought:
            continue
        brought.add(path)
        content = (ROOT / path).read_text()
        files.append(File.generated(config, f"{BROUGHT}/{path}", content=content))
        waiting += _outside(path, content) if path.endswith(".md") else []
    files.append(File.generated(config, NOTEBOOK_PAGE, content=_notebook_page()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point links into the site, and fill in the tables of schemas."""
    here = page.file.src_uri
    origin = here.removeprefix(f"{BROUGHT}/") if here.startswith(f"{BROUGHT}/") else f"docs/{here}"
    origin = f"docs/{NOTEBOOK.name}" if here == NOTEBOOK_PAGE else origin

    def moved(link: re.Match[str]) -> str:
        before, target, after = link.groups()
        path = _resolved(origin, target)
        if path is None:
            return link[0]
        is_notebook = path == f"docs/{NOTEBOOK.name}" and here != NOTEBOOK_PAGE  # which alone offers the file itself
        path = NOTEBOOK_PAGE if is_notebook else _place(path)
        return f"{before}{posixpath.relpath(path, posixpath.dirname(here) or '.')}{after}"

    parts = _CODE.split(markdown)  # code at the odd places, which is left alone
    parts[::2] = [_SCHEMA.sub(lambda name: _schema_table(name[1]), _LINK.sub(moved, part)) for part in parts[::2]]
    return "".join(parts)


def on_page_content(html: str, **_: Any) -> str:
    """Equations as MathML."""

    def rendered(maths: re.Match[str]) -> str:
        display = "block" if maths[2] == "[" else "inline"
        return convert(unescape(maths[3]).strip(), display=display)

    return _MATHS.sub(rendered, html)


def _outside(page: str, text: str) -> list[str]:
    """The files of the repository, outside docs/, that a page links to."""
    words = "".join(_CODE.split(text)[::2])
    found = (_resolved(page, target) for _, target, _ in _LINK.findall(words))
    return [path for path in found if path is not None and not path.startswith("docs/") and path != "README.md"]


def _resolved(page: str, target: str) -> str | None:
    """The file of the repository that a link leads to; none: an address."""
    if re.match(r"\w+:", target):
        return None
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), target))


def _place(path: str) -> str:
    """Where a file of the repository lies in the site."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return "index.md" if path == "README.md" else f"{BROUGHT}/{path}"


def _notebook_page() -> str:
    """The cells of the quickstart, one after the other."""
    parts = []
    for cell in json.loads(NOTEBOOK.read_text())["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
    parts.insert(1, "This page is a notebook: [quickstart.ipynb](quickstart.ipynb).")
    return "\n\n".join(parts)


def _schema_table(name: str) -> str:
    """The fields of a schema, of its top and of every part."""
    schema = json.loads((DOCS / "schemas" / f"{name}.json").read_text())
    parts = [("", schema), *schema.get("$defs", {}).items()]
    lines = [f"JSON Schema: [{name}.json](../schemas/{name}.json)."]
    for title, part in parts:
        if "properties" not in part:
            continue
        words = " ".join(part.get("description", "").split("\n\n")[0].split())
        lines += [f"\n**{title}**: {words}\n" if title else "", "| field | is | |", "| --- | --- | --- |"]
        for field, form in part["properties"].items():
            need = "" if field in part.get("required", []) else " (optional)"
            meaning = form.get("description", "").replace("|", "\\|")
            lines.append(f"| `{field}` | {_form(form)}{need} | {meaning} |")
    return "\n".join(lines)


def _form(form: dict[str, Any]) -> str:
    """A type in a few words."""
    if "$ref" in form:
        return form["$ref"].rpartition("/")[2]
    if "anyOf" in form:
        return " or ".join(dict.fromkeys(_form(each) for each in form["anyOf"]))
    if "enum" in form:
        return ", ".join(f"`{value}`" for value in form["enum"])
    if "const" in form:
        return f"`{form['const']}`"
    if form.get("type") == "array":
        return f"list of {_form(form['items'])}" if "items" in form else "list"
    if form.get("type") == "object":
        inner = form.get("additionalProperties")
        return f"object of {_form(inner)}" if isinstance(inner, dict) else "object"
    return str(form.get("type", "anything"))
