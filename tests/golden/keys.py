"""How documents may differ from the golden ones, written down: the redesign fills these tables, and nothing else
excuses a change.

A path is `heads[2.1].flags`: keys joined by dots, rows by what identifies them (layer 2, head 1; a claim by its id) or
by number. In a pattern `*` stands for anything, and a pattern that ends at a branch means all of it. Tables are by kind
of document (scan, probe, compare, train, reproduce, names) or by the name of one document; both apply.
"""

from __future__ import annotations

# Old path to new one: {"probe": {"heads[*].M": "heads[*].predicted_M"}}. Rows of the old path keep their identity.
RENAMED: dict[str, dict[str, str]] = {
    "names": {
        "public.heads": "public.families",
        "commands.reproduce.paper": "commands.reproduce.papers",
        "commands.reproduce.--images": "commands.reproduce.--figures",  # --images are pictures that a model reads
        "columns.probe.M": "columns.probe.predicted_M",
        "columns.probe.F": "columns.probe.predicted_F",
        "columns.probe.localization": "columns.probe.predicted_localization",
    },
    # those of measured tokens; M, F and localization are those of unit tokens, in a scan
    "probe": {
        "heads[*].M": "heads[*].predicted_M",
        "heads[*].F": "heads[*].predicted_F",
        "heads[*].localization": "heads[*].predicted_localization",
        "assumptions.how.M": "assumptions.how.predicted_M",
        "assumptions.how.F": "assumptions.how.predicted_F",
        "assumptions.how.localization": "assumptions.how.predicted_localization",
    },
}

# Values that were changed on purpose, by their path: any other value than this one fails.
CHANGED: dict[str, dict[str, object]] = {
    "probe": {"schema": 2},  # three columns were renamed
    "names": {  # runs were added: arms of headlines have eight seeds; studies j, k and l of bao2024
        "kept_runs.bao2024.bao2024": 511,
        "kept_runs.bao2024.xiao2026": 3,
        "kept_runs.mechanisms.qiu2025": 124,
        "kept_runs.mechanisms.sun2026": 157,
        "kept_runs.mechanisms.xiao2026": 39,
        "kept_runs.mechanisms.zoo": 198,
    },
}

# Keys that were added on purpose: {"scan": ("assumptions.device",)}. Any other additional key fails.
NEW: dict[str, tuple[str, ...]] = {
    "names": (
        *("public.Block", "public.Family", "public.Explanations", "public.explanations", "public.attention_pattern"),
        *("commands.explain", "columns.scan.effective_rank"),
        *("public.discover", "public.Discovered"),
    ),
    "scan": ("assumptions.read", "heads[*].effective_rank", "layers[*].provenance"),
    "compare": (
        *("layers[*][*].provenance", "assumptions.read"),
        *("changes",),  # what changed most
        *("equal", "tensors"),  # whether every number is equal, and then what of all other tensors
        *("heads[*].difference.effective_rank", "medians.effective_rank"),
        *("verdict", "weights", "assumptions.values"),  # what differs in one sentence, and every tensor
        *("heads[*].weights", "heads[*].moved"),  # differences of a head's maps, and where it comes from
    ),
    "probe": (
        *("layers[*].provenance",),
        *("roles",),  # the heads of each role
        *(f"{place}.{kind}_induction" for place in ("heads[*]", "assumptions.how") for kind in ("skip", "pair")),
    ),
    "train": (
        *("scan.layers[*].provenance", "scan.assumptions.read"),
        *("result.plan.convert", "result.plan.convert_at", "result.conversion"),  # null here
        *("result.plan.build", "result.plan.decay_qk"),  # of no effect here
        *("result.plan.deterministic", "result.plan.parents", "result.plan.concentration"),  # of no effect here
        *(f"result.plan.{name}" for name in ("dropout", "schedule", "optimizer", "beta2")),
        *(f"result.plan.{name}" for name in ("words", "select", "report", "bos", "keep")),
        *("scan.heads[*].effective_rank",),
        "log.steps[*].outputs",  # how many outputs the model has, by which a loss at log V is known
    ),
    # where numbers come from, and whether what they are measured under was chosen after the outcome had been seen
    "reproduce-zhai2023-runs": ("assumptions.origins", "claims[*].seen"),
}

# Keys that were removed on purpose, each with a reason in a comment.
GONE: dict[str, tuple[str, ...]] = {
    "names": (
        "commands.probe.--corpus",  # what it chose is the default; --corpus is a path, in train
        "commands.demo.--twin",  # the demo tells another story
        *("flags.few-directions", "flags.repels-itself"),  # columns: most heads that raised them were sound
        "public.papers",  # in a package of their own, locater_lab
        *("public.attention", "public.train"),  # there too: locater_lab.mechanisms, locater_lab.train
        "claims.bao2024.d4",  # c1 in another setting: a second measurement on the page, no second verdict
        "claims.bao2024.d5",  # the same of c2
    ),
    "reproduce-zhai2023-runs": (
        "assumptions.runs",
        "assumptions.origins",
        "claims[*].seen",
    ),  # the first is excluded below
}

# Text that may be worded otherwise; that there is text is still compared.
REWORDED: dict[str, tuple[str, ...]] = {}

# What identifies a row in a list of rows: the first of these that all rows have, and that tells them apart.
IDENTITY: tuple[tuple[str, ...], ...] = (("id",), ("layer", "head"), ("step",), ("layer",))

# Never compared, and not stored: versions, paths, clocks, and what else depends on the machine.
EXCLUDED: dict[str, tuple[str, ...]] = {
    "scan": ("locater", "source"),
    "compare": ("locater", "source"),
    "probe": ("locater", "source", "assumptions.data"),
    "train": (
        "*.locater",
        "*.source",
        "result.seconds",
        "result.tokens_per_second",
        "result.model",
        "result.plan.out",
        "log.steps[*].time",
        "log.warnings[*].time",
        "log.resumed",
    ),
    "reproduce": (
        "locater",
        "assumptions.seconds",
        "assumptions.processor_seconds",
        "assumptions.torch",
        "assumptions.python",
        "assumptions.threads",
    ),
    "reproduce-zhai2023-runs": ("assumptions.runs",),  # the file of kept runs grows
    # seconds of a step, and ratios of such: they follow the machine and what else runs on it
    "reproduce-gerami2024": (
        "studies.cost.tables.times",
        *tuple(
            f"claims[{claim}].{key}"
            for claim in ("d4", "d5")
            for key in ("measured", "spread", "verdict", "decided", "numbers", "p", "alone")
        ),
    ),
}
