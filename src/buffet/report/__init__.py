"""What people look at: the answer of `buffet certify` and the pages about it and about sweeps.

`answer` is what was found about one sentence, `scale` its colours, `page` makes one self-contained document
of a template, data and the components in ``assets``; `certify`, `substitutions` and `sweep` are the pages.
"""

from buffet.report.answer import (
    CertifyReport,
    ModelInfo,
    Picture,
    QueryInfo,
    Shown,
    TaskResult,
    Token,
    Versions,
    shades,
    shown,
)
from buffet.report.certify import render_html
from buffet.report.scale import RAMP
from buffet.report.substitutions import render_substitutions
from buffet.verdicts import Verdict, together

__all__ = [
    "RAMP",
    "CertifyReport",
    "ModelInfo",
    "Picture",
    "QueryInfo",
    "Shown",
    "TaskResult",
    "Token",
    "Verdict",
    "Versions",
    "render_html",
    "render_substitutions",
    "shades",
    "shown",
    "together",
]
