"""The attention layers of any model or checkpoint: by the record of its family, or found in a forward pass.

`reading_models` chooses. Without a record, `example_inputs` guesses what a model takes, `passes` runs a copy of it on
tape, `reading` makes a layout of each attention call, `verifying` holds the layout to a pass with other parameters,
`disk` does the same for a checkpoint.
"""

from locater.discovery.reading_models import attention_layers, layers_of, read_source
from locater.discovery.searching import Discovered, discover

__all__ = ["Discovered", "attention_layers", "discover", "layers_of", "read_source"]
