"""One self-contained page: a template, data that is embedded once, and the components that draw it.

Nothing is loaded, and nothing in the data can run: the page carries a content security policy that allows our
own style and script, by their hashes, and forbids everything else.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from importlib.resources import files

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from buffet.report.scale import RAMP, ink

COMPONENTS = ("dom.js", "axis.js", "statistics.js", "charts.js", "table.js", "words.js")
"""What all pages are built of, in the order in which they need each other."""


def render(template: str, data: Mapping[str, object], scripts: Sequence[str], **context: object) -> str:
    """The page of a template, its data and the scripts that go with it; everything in it is escaped."""
    style = "\n".join([_asset("style.css"), _ramp()])
    script = "\n".join(['"use strict";', *map(_asset, (*COMPONENTS, *scripts))])
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; img-src data:;"
        " base-uri 'none'; form-action 'none'"
    )
    return (
        _environment()
        .get_template(template)
        .render(
            **context,
            data=data,
            policy=policy,
            # Ours, and under the policy's hashes: nothing in them comes from data.
            style=Markup(style),
            script=Markup(script),
        )
    )


def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("buffet.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # Strict JSON; Jinja writes <, >, & and ' in it as escapes, so that it cannot end its element.
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    return environment


def _asset(name: str) -> str:
    return (files("buffet.report") / "assets" / name).read_text(encoding="utf-8")


def _ramp() -> str:
    """The colours of the ramp as classes, each with letters that can be read on it."""
    return "\n".join(
        f".s{step} {{ background: {colour}; color: {ink(step)}; fill: {colour}; }}"
        for step, colour in enumerate(RAMP)
    )


def _hash(content: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
