"""Configuration of Sphinx, which builds the site of the documents and of the public names: ``make docs``.

The pages are the Markdown files where they are, so that a link between two of them is the same here and in a checkout.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util import logging

import delta_tracker
from delta_tracker import monitor

project = "delta_tracker"
author = "the delta_tracker authors"
project_copyright = author
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.githubpages", "sphinx.ext.napoleon"]
root_doc = "README"
html_title = project
html_theme = "furo"
html_show_sphinx = False
html_static_path = ["static"]
html_css_files = ["site.css"]
highlight_language = "none"
pygments_style = "default"

exclude_patterns = [".venv", ".hypothesis", "docs-output", "**/__pycache__"]
include_patterns = [
    "*.md",
    ".github/*.md",
    "benchmarks/**.md",
    "delta_tracker/**.md",
    "delta_tracker/guide/reference/*.rst",
    "examples/**.md",
    "tests/**.md",
]

# Pages of the side bar, by heading.
_CONTENTS = {
    "First steps": """
        delta_tracker/guide/start
        delta_tracker/guide/concepts
        examples/README
    """,
    "Guides": """
        delta_tracker/guide/train
        delta_tracker/guide/raw_ids
        delta_tracker/guide/serve
        delta_tracker/guide/fleet
        delta_tracker/guide/operate
        delta_tracker/guide/recover
        delta_tracker/guide/monitor
        delta_tracker/guide/extend
    """,
    "Reference": """
        delta_tracker/guide/errors
        delta_tracker/guide/reference/training
        delta_tracker/guide/reference/serving
        delta_tracker/guide/reference/monitoring
        delta_tracker/guide/reference/errors
        delta_tracker/stream/FORMAT
    """,
    "Decide": """
        delta_tracker/guide/promises
        delta_tracker/guide/upgrade
        delta_tracker/guide/compare
        benchmarks/README
        benchmarks/faults/README
        benchmarks/ATTEMPTS
    """,
    "Code": """
        delta_tracker/README
        .github/CONTRIBUTING
        tests/README
        tests/conformance/README
        examples/cpp_reader/README
        delta_tracker/monitor/wishes
        CHANGELOG
    """,
}

myst_heading_anchors = 4
autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
napoleon_use_ivar = True
napoleon_numpy_docstring = False

# Names in the modules that define them, and in the packages that export them.
_EXPORTED = {f"{home}.{name}": f"delta_tracker.{name}" for name, home in delta_tracker._HOMES.items()}  # noqa: SLF001
_EXPORTED |= {
    f"{kind.__module__}.{kind.__name__}": f"delta_tracker.monitor.{kind.__name__}"
    for kind in (monitor.Event, monitor.Monitor, monitor.Severity, monitor.Window)
}

_logger = logging.getLogger(__name__)


def _add_contents(app: Sphinx, page: str, source: list[str]) -> None:
    """Add the side bar to the first page; results of benchmarks are reached by links only."""
    if page.startswith("benchmarks/results/"):
        source[0] = f"---\norphan: true\n---\n{source[0]}"
    elif page == app.config.root_doc:
        for heading, pages in _CONTENTS.items():
            names = "\n".join(f"/{name}" for name in pages.split())
            source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {heading}\n\n{names}\n```\n"


def _find_public(
    app: Sphinx, environment: BuildEnvironment, node: pending_xref, content: nodes.TextElement
) -> nodes.Element | None:
    """Resolve a name of the module that defines it: the reference has it in the package that exports it.

    Names that are not public stay without a link. A public name that does not exist is a warning.
    """
    target = node.get("reftarget", "")
    for own, public in _EXPORTED.items():
        if target == own or target.startswith(f"{own}."):
            name = f"{public}{target.removeprefix(own)}"
            domain = environment.domains.python_domain
            page, kind = node["refdoc"], node["reftype"]
            found = domain.resolve_xref(environment, page, app.builder, kind, name, node, content)
            if found is None:
                _logger.warning("the reference has no %s", name, location=node)
            return found
    return None


def _check_complete(_: Sphinx, environment: BuildEnvironment) -> None:
    """Warn of a public name that no page documents."""
    public = {f"delta_tracker.{name}" for name in delta_tracker.__all__}
    for name in sorted(public - environment.domains.python_domain.objects.keys()):
        _logger.warning("no page of the reference has %s", name)


def _write_index(app: Sphinx, error: Exception | None) -> None:
    """Make the first page the one that a web server shows for a folder."""
    if error is None:
        folder = Path(app.outdir)
        shutil.copy(folder / f"{app.config.root_doc}.html", folder / "index.html")


def setup(app: Sphinx) -> None:
    """Connect the functions of this file."""
    app.connect("source-read", _add_contents)
    app.connect("missing-reference", _find_public)
    app.connect("env-check-consistency", _check_complete)
    app.connect("build-finished", _write_index)
