"""How Sphinx builds the site: ``python -m sphinx -W docs build/site``. It needs no network."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sphinx.application import Sphinx

project = "minloader"
html_theme = "furo"
html_title = project
html_show_copyright = False
smartquotes = False  # what stands in quotes is often a value to type: "keep"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

# The site is the same with and without torch and JAX, and built sooner without.
autodoc_mock_imports = ["jax", "torch"]
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_format = "short"
add_module_names = False  # the heading says it, and some are in a private one
napoleon_numpy_docstring = False
napoleon_use_ivar = True  # or a field named under "Attributes:" would be described twice

# Every name must lead somewhere, except those that other projects document (their sites are not
# asked, since that needs a network) and the private ones in signatures.
nitpicky = True
nitpick_ignore_regex = [
    ("py:.*", r"(collections|contextlib|multiprocessing|os|weakref|numpy|np|jax|torch)\..+"),
    ("py:.*", r"B|BaseContext|DTypeLike|LookUp|NDArray|On(Sample)?Error|Prefetch|Shape|Weights"),
    ("py:.*", r"minloader\.(\w+\.)*_.+"),
]


def _begin_with_a_comment(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    """Begin an attribute's docstring with a comment, since napoleon looks for a type up to the
    first colon of the first line, and an ordinary sentence may hold one.
    """
    if what in ("attribute", "data", "property"):
        lines[:0] = ["..", ""]


def _without_private_paths(app: Sphinx, doctree: Any, page: str) -> None:
    """Show classes without the module that they are in, where that is private."""
    for node in list(doctree.findall()):
        if type(node).__name__ == "Text" and "minloader._" in node:
            node.parent.replace(node, type(node)(re.sub(r"minloader\._[a-z_.]*", "", node)))


def setup(app: Sphinx) -> None:
    """Have docstrings pass through here before they reach napoleon, whose priority is 500."""
    app.connect("autodoc-process-docstring", _begin_with_a_comment, priority=400)
    app.connect("doctree-resolved", _without_private_paths)
