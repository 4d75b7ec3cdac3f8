"""The bench of faults: what a verdict of Locater is worth (docs/verdicts.md).

Faults are data (`faults.py`), planted (`planting.py`) in checkpoints on disk (`checkpoint.py`, `writing.py`) of real models
and of tiny ones of every family (`models.py`). Each command is asked about each planted model (`commands.py`); every answer is a
line of docs/results/verdicts.jsonl (`bench.py`), and the page is made from the lines (`counting.py`, `page.py`).

    make verdicts                  # the demo alone
    make verdicts MODELS=folder    # and the real models of that folder, and tiny ones
"""
