# `just` lists these; `just setup` once, then the rest. What CI runs is .ci/run.

venv := ".venv/bin/"

default:
    @just --list

# the environment, as CI makes it
setup:
    python3 -m venv .venv
    {{venv}}pip install -q -c constraints.txt -e '.[dev]'

# the inner loop: under a minute
quick *args:
    {{venv}}pytest -m "not slow" {{args}}

# all tests
test *args:
    {{venv}}pytest {{args}}

# lint, format and types, as CI checks them
lint:
    {{venv}}ruff check .
    {{venv}}ruff format --check .
    {{venv}}mypy

# mend what can be mended
fix:
    {{venv}}ruff check --fix .
    {{venv}}ruff format .

# branch coverage of the package; below 90 % it fails
coverage:
    {{venv}}pytest --cov

# the perplexity gate of the embedded model
gate folder="demo-gate":
    {{venv}}ffncompress run recipes/demo.yaml -o {{folder}} --overwrite

# the documentation, read while it is written
site:
    {{venv}}mkdocs serve

# what the docs show that a command makes
docs:
    {{venv}}python docs/building/schemas.py
    {{venv}}python docs/building/pictures.py
    {{venv}}ffncompress profile demo --probe --pitfall worst --against-random --cross-feed -o report --overwrite
    cp report/report.html docs/report.html

# what is uploaded to the package index, checked
build:
    {{venv}}python -m build --outdir dist
    {{venv}}twine check --strict dist/*
