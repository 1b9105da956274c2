"""buffet proves how far the words of a sentence can move before a transformer may change its answer.

>>> import buffet
>>> model = buffet.load()                                      # the embedded sentiment model
>>> x = model.embed("a gripping , moving film")                # tokens × width
>>> region = buffet.LpBall(x, words=[2], p=2)                  # row 2 may move
>>> buffet.verify(model, region, eps=0.01).verdict
'certified'
>>> radius = buffet.radius(model, region)
>>> 0 < radius.certified < radius.attacked
True
"""

from buffet.system import openmp as openmp  # before PyTorch

# isort: split
from buffet.certificates.certificate import Certificate, certify_to
from buffet.engine import Engine
from buffet.errors import BuffetError
from buffet.loading import Model, load
from buffet.methods import METHODS, Method
from buffet.methods import method_named as method
from buffet.regions import Box, CandidateSet, LpBall, Region
from buffet.results import Radius, TaskRadius, Verification
from buffet.search.radius import radius
from buffet.verification.verify import verify

__all__ = [
    "METHODS",
    "Box",
    "BuffetError",
    "CandidateSet",
    "Certificate",
    "Engine",
    "LpBall",
    "Method",
    "Model",
    "Radius",
    "Region",
    "TaskRadius",
    "Verification",
    "certify_to",
    "load",
    "method",
    "radius",
    "verify",
]
