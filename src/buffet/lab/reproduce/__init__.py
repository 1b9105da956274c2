"""The paper's whole evaluation: models → tasks → sweep → margin curves → figures, tables and an index page.

`scales` says what is evaluated and how much of it, `jobs` the work besides the sweeps, `stages` does all of
it in order and remembers what is done, `results` what came out, `figures`, `tables` and `index` what people
see.
"""

from buffet.lab.reproduce.scales import SCALES, Scale, Subject
from buffet.lab.reproduce.stages import Stage, Workspace, reproduce

__all__ = ["SCALES", "Scale", "Stage", "Subject", "Workspace", "reproduce"]
