"""How much of a data set is proven: clean accuracy, certified accuracy, accuracy under attack.

`questions` are what may be done to a sentence (`arguments` makes them of what users pass), `work` asks one of
a sentence, `rows` hold what came out, `run` goes through a data set (`examples` reads and samples it) with
the workers of `buffet.experiments`, `accuracy` counts, `result` is the answer, and `evaluate` puts it
together.
"""

from buffet.evaluation.accuracy import Accuracy, Share
from buffet.evaluation.evaluate import evaluate
from buffet.evaluation.questions import Balls, Exchanges, Question
from buffet.evaluation.result import Evaluation
from buffet.evaluation.rows import SentenceRow

__all__ = ["Accuracy", "Balls", "Evaluation", "Exchanges", "Question", "SentenceRow", "Share", "evaluate"]
