"""One forward pass of a model, written down call by call: `Tape`; what led to a value: `upstream`; computing a part of
it again with other values: `replay`. Knows tensors, functions and modules, and no architecture.
"""

from locater.tape.recording import Made, Node, Tape
from locater.tape.replaying import replay

__all__ = ["Made", "Node", "Tape", "replay"]
