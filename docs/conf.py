"""Sphinx settings: ``sphinx-build -W docs docs/_build`` (extra ``docs``)."""

import kvx

project = "kvx"
version = release = kvx.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
html_theme = "furo"
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "none"
nitpicky = False
