"""Checks that README and docs name only options, variables, files, paths and errors
that exist.

Also checks that the programs accept the commands and requests in the docs.
"""

import argparse
import ast
import json
import re
import shlex
import subprocess
from pathlib import Path
from pkgutil import resolve_name

import pytest

from benchmarks.bench.cli import SUBCOMMANDS
from benchmarks.evaluate import make_parser
from deploy.cli import COMMANDS
from model.architectures.rotation import ROPE_TYPES
from model.architectures.table import ARCHITECTURES
from protocol import errors
from protocol.kv_params import HINT, RELEASE_PATH, SENDER_RELEASES, KVTransferParams
from protocol.openai import openapi
from protocol.openai.chat import ChatRequest
from protocol.openai.completions import CompletionRequest
from protocol.openai.requests import supported_fields, validate
from protocol.openai.responses_request import ResponsesRequest
from protocol.settings.settings import UpSettings, load
from protocol.settings.sources import (
    MACHINE_VARIABLES,
    field_paths,
    option_name,
    variable_name,
)
from proxy import errors as proxy_errors

ROOT = Path(__file__).resolve().parents[2]
DOCS = sorted(
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
)
PAGES_ABOUT_THE_CODE = [
    "CONTRIBUTING.md",
    "docs/design.md",
    "docs/structures.md",
    "docs/walkthrough.md",
]
# Options that the docs name but that are not Baton's: a placeholder, and options of
# docker, argparse, pip, kubectl and Ray.
FOREIGN_OPTIONS = {
    "--address",
    "--head",
    "--wait",
    "--kebab-case",
    "--profile",
    "--build",
    "--env-file",
    "--help",
    "--index-url",
    "--deps",  # --no-deps of pip
    "--replicas",
}
# The settings class of each command, or a function that returns its argparse parser.
ALL_PROGRAMS = {
    f"baton {name}": resolve_name(command.options) for name, command in COMMANDS.items()
}
PARSERS = {
    name: make() for name, make in ALL_PROGRAMS.items() if not isinstance(make, type)
}
ALL_FIELDS = [
    fields
    for name, program in ALL_PROGRAMS.items()
    if name not in PARSERS
    for fields in field_paths(program)
]


def _options_of(parser: argparse.ArgumentParser) -> set[str]:
    """Return the options of a parser and of its subcommands, without `--no-`."""
    options = set()
    for action in parser._actions:
        options |= {option.replace("--no-", "--") for option in action.option_strings}
        if isinstance(action, argparse._SubParsersAction):
            options |= set().union(*map(_options_of, action.choices.values()))
    return options


ALL_OPTIONS = set(map(option_name, ALL_FIELDS)).union(
    *map(_options_of, PARSERS.values())
)
# These files also name options of programs other than Baton's.
FILES_WITH_FOREIGN_OPTIONS = ("evaluation.md", "performance.md", "CONTRIBUTING.md")
BATON_DOCS = [path for path in DOCS if path.name not in FILES_WITH_FOREIGN_OPTIONS]


@pytest.mark.parametrize("path", BATON_DOCS, ids=lambda path: path.name)
def test_every_option_in_the_docs_exists(path):
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*(?:\.[a-z-]+)?", path.read_text()))
    named = {name.replace("--no-", "--") for name in named if not name.endswith("-")}
    assert named - ALL_OPTIONS - FOREIGN_OPTIONS == set()


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_every_file_in_the_docs_exists(path):
    text = path.read_text()
    named = set(re.findall(r"`((?:tests|docs|deploy|benchmarks)/[\w./-]+)`", text))
    linked = {str((path.parent / link).relative_to(ROOT)) for link in _links(text)}
    missing = {name for name in named | linked if not (ROOT / name).exists()}
    assert missing == set()


@pytest.mark.parametrize("path", BATON_DOCS, ids=lambda path: path.name)
def test_every_variable_in_the_docs_is_read(path):
    names = set(map(variable_name, ALL_FIELDS))
    named = set(re.findall(r"\bBATON_[A-Z_]*[A-Z]\b", path.read_text())) - {
        "BATON_UPPER_CASE"
    }
    assert named - names - MACHINE_VARIABLES == set()


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_every_source_file_in_the_docs_exists(path):
    sources = [f"/{one.relative_to(ROOT)}" for one in ROOT.glob("[a-z]*/**/*.py")]
    named = set(re.findall(r"`((?:\w+/)*\w+\.py)`", path.read_text()))
    assert {
        name for name in named if not any(one.endswith(f"/{name}") for one in sources)
    } == set()


@pytest.mark.parametrize("name", PAGES_ABOUT_THE_CODE)
def test_every_identifier_in_the_pages_about_the_code_exists(name):
    sources = [one for one in ROOT.glob("[a-z]*/**/*.py") if one != Path(__file__)]
    words = {word for one in sources for word in re.findall(r"\w+", one.read_text())}
    text = (ROOT / name).read_text()
    identifiers = set(re.findall(r"`(_?[A-Za-z]\w*(?:\.\w+)*)(?:\(\))?`", text))
    is_file = re.compile(r"\.(py|md|js|json|ya?ml|toml)$").search
    assert identifiers, "the pattern finds no identifier"
    assert {
        identifier
        for identifier in identifiers
        if not is_file(identifier) and identifier.rpartition(".")[2] not in words
    } == set()


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_every_make_target_in_the_docs_exists(path):
    targets = re.findall(r"(?m)^([a-z-]+):", (ROOT / "Makefile").read_text())
    named = re.findall(r"(?m)(?:^ {4}|`)make ([a-z][a-z-]*)", path.read_text())
    assert set(named) <= set(targets)


def test_models_in_the_docs_match_the_code():
    text = (ROOT / "docs" / "models.md").read_text()
    served = text.partition("Served are")[2].partition(". Refused")[0]
    kinds = ("ForCausalLM", "ForConditionalGeneration")
    named = {name for name in re.findall(r"`(\w+)`", served) if name.endswith(kinds)}
    types = re.findall(r"`(\w+)`", served.partition("rope types")[2].partition(". ")[0])
    assert named == set(ARCHITECTURES) and types == [*ROPE_TYPES]


# -- examples


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_every_command_in_the_docs_is_accepted(path, monkeypatch):
    monkeypatch.setenv("BATON_CLUSTER_SECRET", "the texts set it before the command")
    # This joins commands that are split over several lines.
    text = re.sub(r"\\\n\s*", "", path.read_text())
    command = re.compile(
        r"(?m)(?:^ {4}(?:[\w-]+\$ )?|`)(baton [a-z]+)([ -~]*?)(?=[`#]|$)"
    )
    commands = command.findall(text)
    assert commands or not re.search(r"(?m)^ {4}(?:[\w-]+\$ )?baton ", text)
    for name, options in commands:
        argv = shlex.split(options.partition(" > ")[0])
        if name in PARSERS:
            # A mere mention of a command or of its subcommand has no options.
            is_mention = not argv or (argv[0] in SUBCOMMANDS and len(argv) == 1)
            assert is_mention or PARSERS[name].parse_args(argv)
        else:
            assert isinstance(load(ALL_PROGRAMS[name], argv), ALL_PROGRAMS[name])


def test_the_arguments_of_make_are_accepted():
    readme, evaluation = (ROOT / name for name in ("README.md", "docs/evaluation.md"))
    serve, evaluate = (
        [
            shlex.split(words)
            for words in re.findall(r'ARGS="(--[^"]+)"', path.read_text())
        ]
        for path in (readme, evaluation)
    )
    assert len(serve) >= 2 and len(evaluate) >= 2
    for argv in serve:
        load(UpSettings, argv)
    for argv in evaluate:
        make_parser().parse_args(["--tasks", "piqa", *argv])


@pytest.mark.parametrize(("given", "code"), [("PORT=8031", 0), ("port=8031", 2)])
def test_make_refuses_variables_that_it_does_not_read(given, code):
    command = [
        "make",
        "--dry-run",
        "serve",
        given,
        "ARGS=--decode.count 2 --prefill.tp=2",
    ]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == code
    message = done.stderr if code else done.stdout
    assert ("--port '8031'" if code == 0 else "no variable here: port; ") in message


def test_the_requests_of_the_readme_are_accepted():
    text = (ROOT / "README.md").read_text()
    (body,) = re.findall(r"-d '(\{.*\})'", text)
    request = validate(CompletionRequest, json.loads(body))
    assert request.prompt == "The capital of France is"
    (program,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (create,) = [
        node
        for node in ast.walk(ast.parse(program))
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "create"
    ]
    given = {str(each.arg): ast.literal_eval(each.value) for each in create.keywords}
    assert len(validate(ChatRequest, given).messages) == len(given["messages"])


def test_fields_of_responses_are_documented():
    text = (
        (ROOT / "docs" / "structured_output.md")
        .read_text()
        .partition("## /v1/responses")[2]
    )
    of_all = {"model", "stream", "kv_transfer_params"}
    named = set(re.findall(r"`(\w+)", text.partition("### Differences")[0]))
    assert named == supported_fields(ResponsesRequest) - of_all


# -- docs/api.md

API = (ROOT / "docs" / "api.md").read_text()


def _rows(heading: str) -> list[list[str]]:
    """Returns the cells of the first table after `heading`, without the table's
    head.
    """
    lines = API[API.index(heading) :].splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith("|"))
    end = next(
        (i for i, line in enumerate(lines) if i > begin and not line.startswith("|")),
        None,
    )
    return [line.strip("| ").split(" | ") for line in lines[begin + 2 : end]]


def _names(cell: str) -> list[str]:
    return re.findall(r"`(\w+)`", cell)


def _leaf_classes(root: type[errors.BatonError]) -> set[type[errors.BatonError]]:
    below = root.__subclasses__()
    return {root} if not below else set().union(*map(_leaf_classes, below))


def test_table_of_errors_matches_the_code():
    message = {
        (_names(code)[0], status, again)
        for code, status, again, *_ in _rows("## Errors")
    }
    modules = (errors.__name__, proxy_errors.__name__)
    kinds = {
        kind for kind in _leaf_classes(errors.BatonError) if kind.__module__ in modules
    }
    matches = {(k.code, str(k.status), "yes" if k.retryable else "no") for k in kinds}
    assert message == matches


def test_tables_of_kv_transfer_params_match_the_code():
    orders = {"do_remote_prefill", "do_remote_decode"}
    from_p = [name for row in _rows("From P, to D") for name in _names(row[0])]
    assert len(from_p) == len(set(from_p))
    assert set(from_p) == {
        *KVTransferParams.__struct_fields__,
        *orders,
        SENDER_RELEASES,
    }
    to_p = {name for row in _rows("To P, all optional") for name in _names(row[0])}
    assert to_p == {*orders, "transfer_id", HINT}


def test_every_path_of_the_openapi_document_is_documented():
    assert set(openapi.document()["paths"]) | {RELEASE_PATH} <= set(
        re.findall(r"/[\w/{}]+", API)
    )


def test_every_symptom_in_troubleshooting_is_quoted_from_the_code():
    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    symptoms = re.findall(r"(?m)^### (.+)$|^- (\*\*`.+?):?\*\*", text)
    quoted = {
        part
        for cell in map("".join, symptoms)
        for part in re.findall(r"`([^`]+)`", cell)
    }
    assert len(quoted) >= 20
    packages = (
        "protocol",
        "kvcache",
        "attention",
        "model",
        "engine",
        "deploy",
        "proxy",
    )
    sources = [path for name in packages for path in (ROOT / name).rglob("*.py")]
    quoted_text = " ".join(path.read_text() for path in sources)
    # Join string literals that span several lines.
    quoted_text = re.sub(r'"\s*\n?\s*f?"', "", quoted_text)
    pieces = {
        piece.strip() for phrase in quoted for piece in re.split("…|SIGKILL", phrase)
    }
    assert {piece for piece in pieces if piece not in quoted_text} == set()


def _links(text: str) -> list[str]:
    return re.findall(r"\]\(([\w./-]+\.md)\)", text)
