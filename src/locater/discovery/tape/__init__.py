"""One forward pass of a model, written down call by call (`Tape`). `linear_maps` finds the maps that a value was
computed from, `replay` computes a part of the pass again with other values. The tape knows tensors, functions and
modules, and no architecture.
"""

from locater.discovery.tape.recording import ModuleResult, Node, Tape, replay

__all__ = ["ModuleResult", "Node", "Tape", "replay"]
