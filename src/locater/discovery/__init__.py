"""The attention layers of any model or checkpoint: by the record of its family, or found in a forward pass.

`record_or_discovery` chooses. Without a record, `example_inputs` guesses what a model takes, `redrawn_copy` runs a copy
of it on tape, `layout_of_call` makes a layout of each attention call, `verified_search` holds the layout to a pass with
other parameters, `from_config_json` does the same for a checkpoint.
"""

from locater.discovery.record_or_discovery import attention_layers, layers_of, read_source
from locater.discovery.verified_search import Discovered, discover

__all__ = ["Discovered", "attention_layers", "discover", "layers_of", "read_source"]
