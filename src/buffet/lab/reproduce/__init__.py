"""The paper's whole evaluation: models → tasks → sweep → margin curves → figures, tables and an index page.

`scales` says what is evaluated and how much of it, `jobs` the work besides the sweeps, `stages` does all of
it in order and remembers what is done. `records` are what came out, in a file that names no sentence, and
`results` the same arranged; `figures`, `tables`, `claims` and `index` are what people see, with the numbers
of the `paper` next to ours.
"""

from buffet.lab.reproduce.records import Records
from buffet.lab.reproduce.scales import SCALES, Scale, Subject
from buffet.lab.reproduce.stages import Stage, Workspace, draw, reproduce

__all__ = ["SCALES", "Records", "Scale", "Stage", "Subject", "Workspace", "draw", "reproduce"]
