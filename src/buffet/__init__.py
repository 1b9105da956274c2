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

from typing import TYPE_CHECKING

from buffet.lazy import lazy

if TYPE_CHECKING:
    from buffet import loading
    from buffet.certificates.certificate import Certificate, certify_to
    from buffet.engine import Engine
    from buffet.errors import BuffetError
    from buffet.evaluation import evaluate
    from buffet.loading import Model, OnnxModel, load, read_vnnlib
    from buffet.methods import METHODS, Method, method
    from buffet.properties import Property
    from buffet.regions import Box, CandidateSet, LpBall, Region
    from buffet.results import Radius, TaskRadius, Verification
    from buffet.search.radius import radius
    from buffet.verification.verify import verify
    from buffet.version import __version__ as __version__
    from buffet.words import substitutions

__getattr__, __dir__ = lazy(
    __name__,
    {
        "METHODS": "buffet.methods",
        "Box": "buffet.regions",
        "BuffetError": "buffet.errors",
        "CandidateSet": "buffet.regions",
        "Certificate": "buffet.certificates.certificate",
        "Engine": "buffet.engine",
        "LpBall": "buffet.regions",
        "Method": "buffet.methods",
        "Model": "buffet.loading",
        "OnnxModel": "buffet.loading",
        "Property": "buffet.properties",
        "Radius": "buffet.results",
        "Region": "buffet.regions",
        "TaskRadius": "buffet.results",
        "Verification": "buffet.results",
        "__version__": "buffet.version",
        "certify_to": "buffet.certificates.certificate",
        "evaluate": "buffet.evaluation",
        "load": "buffet.loading",
        "loading": "buffet.loading",
        "method": "buffet.methods",
        "radius": "buffet.search.radius",
        "read_vnnlib": "buffet.loading",
        "substitutions": "buffet.words",
        "verify": "buffet.verification.verify",
    },
)

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
    "OnnxModel",
    "Property",
    "Radius",
    "Region",
    "TaskRadius",
    "Verification",
    "certify_to",
    "evaluate",
    "load",
    "loading",
    "method",
    "radius",
    "read_vnnlib",
    "substitutions",
    "verify",
]
