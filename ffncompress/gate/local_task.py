"""A task in a local YAML file, in lm-eval's own format; it may come from a stranger, so nothing in it is run.

lm-eval's format can name Python functions (`!function`), include other files, and load data sets by script; and its
templates are Jinja without a sandbox. What is read here has none of that: a few known keys, rows of a local file, and
templates that only look fields up and dress them. All else is refused by name.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ffncompress.errors import TextError
from ffncompress.sanitize import in_short, plain
from ffncompress.schema import first_fault

ENDINGS = (".yaml", ".yml")
LONGEST = 100_000  # characters
DEEPEST = 10  # collections within each other
METHODS = frozenset(
    ("index", "strip", "lstrip", "rstrip", "split", "rsplit", "lower", "upper", "title", "capitalize", "replace")
)
FILTERS = frozenset(("lower", "upper", "title", "capitalize", "trim", "replace", "join", "length", "first", "last"))

Template = Annotated[str, Field(max_length=10_000)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Metric(_Part):
    """How answers are scored."""

    metric: Literal["acc", "acc_norm"]
    aggregation: Literal["mean"] = "mean"
    higher_is_better: Literal[True] = True


class DataFiles(_Part):
    """Where the rows are, by split."""

    data_files: str | dict[str, str]


class LocalTask(_Part):
    """The keys of lm-eval's format that are taken."""

    task: str = Field(pattern=r"^[A-Za-z0-9][\w.-]{0,63}$")
    dataset_path: Literal["json", "text", "parquet"]
    dataset_kwargs: DataFiles
    output_type: Literal["multiple_choice", "loglikelihood"]
    test_split: str | None = None
    validation_split: str | None = None
    fewshot_split: str | None = None
    num_fewshot: int = Field(0, ge=0, le=100)
    description: Template = ""
    doc_to_text: Template
    doc_to_target: Template | int
    doc_to_choice: Template | list[str] | None = None
    target_delimiter: str = Field(" ", max_length=100)
    fewshot_delimiter: str = Field("\n\n", max_length=100)
    metric_list: list[Metric] = Field([Metric(metric="acc")], min_length=1)
    tag: str | list[str] | None = None  # lm-eval's, for lists of tasks
    metadata: dict[str, str | int | float] | None = None  # likewise

    def to_lm_eval(self, folder: Path) -> dict[str, Any]:
        """The task as lm-eval takes it, with its rows; data files are looked for from its own folder on."""
        splits = {name: _rows(self.dataset_path, folder / file) for name, file in self._files().items()}
        for name in filter(None, (self.test_split, self.validation_split, self.fewshot_split)):
            if name not in splits:
                raise TextError(f"task {self.task}: its data_files have no split {plain(name)!r}; name another")
        given = self.model_dump(exclude={"dataset_path", "dataset_kwargs", "tag", "metadata"}, exclude_none=True)
        return given | {"custom_dataset": lambda **_: splits}

    def _files(self) -> dict[str, str]:
        named = self.dataset_kwargs.data_files
        return {self.test_split or self.validation_split or "test": named} if isinstance(named, str) else named


def is_local(name: str) -> bool:
    """Whether a task is named by its file."""
    return name.endswith(ENDINGS)


def read_local_task(file: str) -> dict[str, Any]:
    """A local task as lm-eval takes it.

    Raises:
        TextError: it cannot be read, or has something in it that is not taken.
    """
    try:
        with Path(file).open(encoding="utf-8") as stream:
            text = stream.read(LONGEST + 1)
    except (OSError, ValueError) as error:
        raise TextError(f"{file}: no such task; give a YAML file, or the name of one of lm-eval's tasks") from error
    try:
        _check_events(text, file)
        task = LocalTask.model_validate(yaml.safe_load(text))
    except ValidationError as error:
        where, what = first_fault(error)
        raise TextError(
            f"{file}: {plain(where)}: {what}; a local task has the keys {', '.join(LocalTask.model_fields)}"
        ) from error
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise TextError(f"{file}: not a task in YAML ({in_short(error)}); mend it") from error
    if not (task.test_split or task.validation_split):
        raise TextError(f"{file}: it names no split to ask; add test_split")
    if (task.doc_to_choice is None) == (task.output_type == "multiple_choice"):
        raise TextError(f"{file}: doc_to_choice belongs to output_type multiple_choice, and to it alone; mend it")
    choices = task.doc_to_choice if isinstance(task.doc_to_choice, list) else [task.doc_to_choice]
    for template in (task.description, task.doc_to_text, task.doc_to_target, *choices):
        check_template(template, file)
    return task.to_lm_eval(Path(file).parent)


def _check_events(text: str, file: str) -> None:
    """Before a tree is built: tags, which can name code, aliases, which can be endless, and depth."""
    if len(text) > LONGEST:
        raise TextError(f"{file}: longer than {LONGEST:,} characters, which no task is; give another")
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if tag := getattr(event, "tag", None):
            raise TextError(f"{file}: {plain(tag)} would run or build something; a local task is data, so leave it out")
        if isinstance(event, yaml.AliasEvent):
            raise TextError(f"{file}: it uses YAML aliases (*name), which a task has no need of; write them out")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > DEEPEST:
            raise TextError(f"{file}: nested more than {DEEPEST} deep, which no task is; mend it")


def check_template(template: str | int | None, file: str) -> None:
    """A template may look fields up, dress them and choose between them; it reaches nothing behind them.

    lm-eval renders templates without a sandbox, where `{{ x.__class__ }}` leads to all of Python. Only listed kinds of
    expressions pass, so what nobody thought of does not.
    """
    from jinja2 import Environment, TemplateError, nodes

    if not isinstance(template, str):
        return
    try:
        tree = Environment(autoescape=True).parse(template)
    except (TemplateError, RecursionError) as error:
        raise TextError(f"{file}: a template cannot be read ({in_short(error)}); mend it") from error
    for node in tree.find_all(nodes.Node):
        if not _only_shows(node):
            named = getattr(node, "attr", None) or getattr(node, "name", None) or ""
            raise TextError(
                f"{file}: a template may look fields up and dress them, and this does more "
                f"({plain(f'{type(node).__name__} {named}'.strip())}); write the field into the data file instead"
            )


def _only_shows(node: Any) -> bool:
    from jinja2 import nodes
    from jinja2.defaults import DEFAULT_NAMESPACE

    match node:
        case nodes.Name(name=name):
            return not name.startswith("_") and name not in DEFAULT_NAMESPACE
        case nodes.Getattr(attr=name):
            return not name.startswith("_")
        case nodes.Getitem(arg=nodes.Const(value=key)):  # of a text, Jinja looks for an attribute too
            return not str(key).startswith("_")
        case nodes.Getitem(arg=key):
            return isinstance(key, nodes.Name | nodes.Getattr | nodes.Neg | nodes.Slice)
        case nodes.Call(node=nodes.Getattr(attr=name)):
            return name in METHODS
        case nodes.Filter(name=name):
            return name in FILTERS
    plain_ones = (
        nodes.Output, nodes.TemplateData, nodes.Const, nodes.CondExpr, nodes.Compare, nodes.Operand, nodes.Not,
        nodes.And, nodes.Or, nodes.Add, nodes.Sub, nodes.Neg, nodes.Concat, nodes.List, nodes.If, nodes.Slice,
    )  # fmt: skip
    return isinstance(node, plain_ones)


def _rows(kind: str, file: Path) -> Any:
    """The rows of a local file; nothing is fetched, and no script is looked for."""
    import datasets

    if "://" in str(file) or not file.is_file():
        raise TextError(f"{file}: no such data file of a task; give one on this machine")
    try:
        if kind == "parquet":
            import pandas

            return datasets.Dataset.from_list(pandas.read_parquet(file).to_dict("records"))
        lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
        rows = [{"text": line} for line in lines] if kind == "text" else _json_rows(lines)
        if not rows:
            raise TextError(f"{file}: there are no rows in it; give a file with some")
        return datasets.Dataset.from_list(rows)
    except TextError:
        raise
    except Exception as error:  # pyarrow, pandas and json each have their own
        raise TextError(f"{file}: its rows cannot be read as {kind} ({in_short(error)}); mend it") from error


def _json_rows(lines: list[str]) -> list[dict[str, Any]]:
    whole = json.loads("\n".join(lines)) if lines and lines[0].lstrip().startswith("[") else None
    rows = whole if whole is not None else [json.loads(line) for line in lines]
    if not all(isinstance(row, dict) for row in rows):
        raise ValueError("a row is an object with named fields")
    return rows
