"""Attention layers of models without a record: found in a forward pass, verified in another one (`searching`).

`example_inputs` guesses what a model takes, `passes` runs a copy of it on tape, `reading` makes a layout of each
attention call, `verifying` holds the layout to a pass with other parameters, `disk` does the same for a checkpoint.
"""
