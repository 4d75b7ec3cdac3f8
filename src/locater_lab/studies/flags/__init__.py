"""How often the flags of a scan are right: trained models scanned, and measured by a probe (docs/flags.md).

A flag that no sound model raises is judged on planted heads. Each model leaves a line in docs/results/flags-heads.jsonl;
its numbers are those of the heads, so that another rule can be judged by them.

    locater reproduce flags --models FOLDER --data FOLDER --runs LINES --jobs 1     # measures the models that LINES lacks

The folder of --models has those of FOLDERS, that of --data the prose (test.txt.xz); without it a probe takes the
documentation inside Python.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import locater
from locater.commands.load_model import load_model
from locater.discovery import attention_layers
from locater.findings.flags import SILENT
from locater.inputs.text import read_text
from locater_lab.engine.claims import Claim, Measurement
from locater_lab.engine.reproduction import Paper, Results, Setting, Study
from locater_lab.train.sweep import append_line, read_lines

PROSE, CHARACTERS = "test.txt.xz", 60_000
TOKENS = 2048  # that a model is measured on
FOLDERS = {
    "SmolLM2-135M-Instruct": "smollm2-135m-instruct",
    "Gemma-3-270M": "gemma3-270m",
    "all-MiniLM-L6-v2": "all-minilm-l6-v2",
    "AntiBERTy": "antiberty",
    "stories260K": "stories260K",
}
PLANTED_HEADS = 4  # of each fault and model, in layers apart
SHARP = 0.15  # measured entropy ratio under which a head is called sharp rightly
LEVEL = 0.95  # and uniform, above which
CHOSEN_ON = (
    "stories260K",
    "all-MiniLM-L6-v2",
)  # models, beside the demo, whose shares the threshold of silent is below
Head = Mapping[str, Any]

# flag: what a scan says, what the probe measures, and both in words. The last two were flags until version 0.2.
FLAGS: dict[str, tuple[Callable[[Head], bool], Callable[[Head], bool], str]] = {
    "nonfinite": (
        lambda x: "nonfinite" in x["flags"],
        lambda x: "nonfinite" in x["measured"],
        "its measured logits are not finite",
    ),
    "uniform": (
        lambda x: "uniform" in x["flags"],
        lambda x: (x["entropy_ratio"] or 0) > LEVEL,
        f"measured entropy ratio above {LEVEL}",
    ),
    "sharp": (
        lambda x: "sharp" in x["flags"],
        lambda x: x["entropy_ratio"] is not None and x["entropy_ratio"] < SHARP,
        f"measured entropy ratio below {SHARP}",
    ),
    "antisymmetric": (
        lambda x: "antisymmetric" in x["flags"],
        lambda x: bool(x["F"]) and x["S"] / x["F"] < -0.5,
        "S/F below -0.5 over the tokens that the head reads",
    ),
    "repels-itself": (
        lambda x: x["M"] is not None and x["M"] < -1,
        lambda x: x["self_mass"] is not None and x["self_mass"] < x["uniform_self"],
        "measured weight of tokens on themselves below that of uniform attention",
    ),
    "few-directions": (
        lambda x: x["prior_skew"] is not None and abs(x["prior_skew"]) > 0.75,
        lambda x: x["skew"] is not None and abs(x["skew"]) > 0.75,
        "skew beyond 0.75 in size over the tokens that the head reads",
    ),
}
COLUMNS = {"repels-itself": "M", "few-directions": "skew"}  # flags until version 0.2
PLANTED = ("nonfinite", "uniform", "sharp", "antisymmetric")

RIGHT = 0.8  # a flag whose precision is below is a column and no flag
FlagCounts = tuple[int, int, int]  # heads that have a flag, of them those where it is right, and all where it would be


def _claim(id: str, says: str, quantity: str) -> Claim:
    return Claim(id, says, quantity, "at least", RIGHT, by="ours")


CLAIMS = (
    *(
        _claim(
            f"a{n}", f"A planted head with the flag `{flag}` is what it says", "share of raised flags that are right"
        )
        for n, flag in enumerate(PLANTED, 1)
    ),
    *(
        _claim(f"b{n}", f"A planted head that is so has the flag `{flag}`", "share of such heads with the flag")
        for n, flag in enumerate(PLANTED, 1)
    ),
    *(
        _claim(
            f"c{n}", f"`{flag}` would be right as a flag on sound models", "share of raised flags that would be right"
        )
        for n, flag in enumerate(COLUMNS, 1)
    ),
)


def measure(setting: Setting) -> Results:
    """Judge the lines that there are; with --jobs measure the models of --models that have none first."""
    if setting.runs is None:
        return Results({})
    lines = {line["model"]: line for path in (*setting.more_runs, setting.runs) for line in read_lines(path)}
    if setting.jobs and setting.models is not None:
        for name, folder in FOLDERS.items():
            if name in lines or not (setting.models / folder).is_dir():
                continue
            prose = None if setting.data is None else setting.data / PROSE
            lines[name] = measure_model(name, setting.models / folder, prose, setting.log)
            append_line(setting.runs, lines[name])
    return results_of([lines[name] for name in FOLDERS if name in lines]) if lines else Results({})


def results_of(lines: Sequence[Mapping[str, Any]]) -> Results:
    """Counts by model and flag, and a measurement for each claim."""
    models = {
        line["model"]: {
            "heads": len(line["heads"]),
            "sound": {flag: count_flagged(line["heads"], flag) for flag in FLAGS},
            "writes": least_written(line),
            "planted": {
                flag: [*count_flagged(line["planted"][flag], flag), len(line["planted"][flag])] for flag in PLANTED
            },
        }
        for line in lines
    }
    measured: dict[str, Measurement | None] = {}
    for n, flag in enumerate(PLANTED, 1):
        raised, right, true = totals(models, "planted", flag)
        measured[f"a{n}"], measured[f"b{n}"] = _share_measurement(right, raised), _share_measurement(right, true)
    for n, flag in enumerate(COLUMNS, 1):
        raised, right, _ = totals(models, "sound", flag)
        measured[f"c{n}"] = _share_measurement(right, raised)
    return Results(measured, {"models": models, "tokens": lines[0]["tokens"]})


def least_written(line: Mapping[str, Any]) -> dict[str, Any]:
    """The head of a model that writes least, and how many are silent."""
    shares = line["written_share"]
    least = min(range(len(shares)), key=shares.__getitem__)
    head = line["heads"][least]
    return {
        "share": round(shares[least], 4),
        "layer": head["layer"],
        "head": head["head"],
        "silent": sum(x < SILENT for x in shares),
    }


def _share_measurement(hits: int, of: int) -> Measurement | None:
    if not of:
        return None
    low, high = wilson(hits, of)
    share = hits / of
    how = "to the farther end of the 95 % interval of Wilson, which is not symmetric"
    return Measurement(share, max(high - share, share - low), how, {"count": hits, "of": of, "interval": [low, high]})


def totals(models: Mapping[str, Mapping[str, Any]], where: str, flag: str) -> FlagCounts:
    """Counts of a flag over all models, on `sound` heads or `planted` ones."""
    rows = [model[where][flag] for model in models.values()]
    return sum(row[0] for row in rows), sum(row[1] for row in rows), sum(row[2] for row in rows)


# ---- what a model says of itself, and what is measured ----


def heads_of(module: nn.Module, data: Any, tokens: int) -> list[dict[str, Any]]:
    """Each head: what a scan of its weights says, and what a probe measures."""
    scanned = locater.scan(module)
    seen = locater.probe(module, data, tokens=tokens)
    measured = {(row.layer, row.head): row for row in seen.rows}
    with_inputs = locater.scan(module, statistics=seen.statistics, length=max(2, seen.assumptions["length"]))
    over_inputs = {(row.layer, row.head): row for row in with_inputs.rows}
    causal = {entry["layer"]: entry["causal"] for entry in scanned.layers}
    rows = []
    for row in scanned.rows:
        at, T = (row.layer, row.head), seen.assumptions["length"]
        probed, tokens_of = measured.get(at), over_inputs.get(at)
        rows.append(
            {
                "layer": row.layer,
                "head": row.head,
                "flags": list(row.flags),
                "M": row.M,
                "prior_skew": row.skew,
                **{name: getattr(tokens_of, name, None) for name in ("S", "F", "skew")},
                **{name: getattr(probed, name, None) for name in ("entropy_ratio", "self_mass")},
                "measured": list(getattr(probed, "flags", ())),
                "uniform_self": sum(1 / n for n in range(1, T + 1)) / T if causal[row.layer] else 1 / T,
            }
        )
    return rows


def heads_to_plant(module: nn.Module, count: int = PLANTED_HEADS) -> list[tuple[int, int]]:
    """Heads in layers apart, another head in each."""
    layers = attention_layers(module)
    chosen = [round((i + 0.5) * len(layers) / count) for i in range(min(count, len(layers)))]
    return [(n, (3 * i + 1) % layers[n].heads) for i, n in enumerate(chosen)]


@torch.no_grad()
def plant_fault(module: nn.Module, fault: str, layer: int, head: int, factor: float = 50.0) -> list[tuple[int, int]]:
    """Give a head a fault, in place; the heads that have it now. Where queries are normalised a factor on the query map
    is harmless, so it goes into the gain of the norm, which all heads of a layer share.
    """
    one = attention_layers(module)[layer]
    rows = slice(head * one.head_dim, (head + 1) * one.head_dim)
    query, bias = one.query.weight(), one.query.bias
    whole = [(layer, n) for n in range(one.heads)]
    if fault == "nonfinite":
        query[rows.start, 0] = math.nan
        return [(layer, head)]
    if fault in ("sharp", "uniform"):
        times = factor if fault == "sharp" else 1 / 1000
        norm = getattr(module.get_submodule(one.name), "q_norm", None)
        if norm is not None:
            norm.weight.copy_((1 + norm.weight) * times - 1)  # Gemma keeps the gain minus 1
            return whole
        query[rows] *= times
        if fault == "uniform" and bias is not None:
            bias[rows] = 0
        return [(layer, head)]
    key = one.key.weight()[head // one.group * one.head_dim :][: one.head_dim]  # W = K^T J^T K, with J^T = -J
    half = one.head_dim // 2
    query[rows] = torch.cat([-key[half:], key[:half]])
    for part in (one.query, one.key):
        if part.bias is not None:
            part.bias.zero_()
    for name in ("q_norm", "k_norm"):
        if (norm := getattr(module.get_submodule(one.name), name, None)) is not None:
            norm.weight.zero_()
    return [(layer, head)]


def measure_model(name: str, folder: Path, prose: Path | None, log: Callable[[str], None]) -> dict[str, Any]:
    """The line of a model: its heads as they are, and with each fault that is planted."""
    data = model_inputs(name, prose)
    planted: dict[str, list[dict[str, Any]]] = {}
    for fault in PLANTED:
        module = load_model(str(folder))
        at = (
            heads_to_plant(module)[-1:] if fault == "nonfinite" else heads_to_plant(module)
        )  # all that follows NaN is NaN
        wanted = {place for layer, head in at for place in plant_fault(module, fault, layer, head)}
        rows = [x for x in heads_of(module, data, TOKENS // 4) if (x["layer"], x["head"]) in wanted]
        planted[fault] = rows
        log(f"{name}, {fault}: {sum(map(FLAGS[fault][0], rows))} of {len(rows)} flagged")
    heads = heads_of(load_model(str(folder)), data, TOKENS)
    shares = [row.written_share for row in locater.scan(folder, values=True).rows]
    return {"model": name, "tokens": TOKENS, "heads": heads, "planted": planted, "written_share": shares}


# ---- counts and shares ----


def wilson(hits: int, of: int) -> tuple[float, float]:
    """The 95 % interval of a share, by Wilson.

    >>> [round(x, 2) for x in wilson(8, 10)]
    [0.49, 0.94]
    """
    if not of:
        return math.nan, math.nan
    z, share = 1.959964, hits / of
    middle, width = share + z * z / (2 * of), z * math.sqrt(share * (1 - share) / of + z * z / (4 * of * of))
    return max(0.0, (middle - width) / (1 + z * z / of)), min(1.0, (middle + width) / (1 + z * z / of))


def share_text(hits: int, of: int) -> str:
    """`4 of 35: 0.11 (0.05 to 0.26)`."""
    if not of:
        return "none"
    low, high = wilson(hits, of)
    return f"{hits} of {of}: {hits / of:.2f} ({low:.2f} to {high:.2f})"


def count_flagged(heads: Iterable[Head], flag: str) -> FlagCounts:
    """Heads that have the flag, of them those where it is right, and all where it would be."""
    said, true, _ = FLAGS[flag]
    pairs = [(said(x), true(x)) for x in heads]
    return sum(a for a, _ in pairs), sum(a and b for a, b in pairs), sum(b for _, b in pairs)


# ---- what the models were made for: chains of antibodies, stories for children, prose ----


RESIDUES = "[PAD] [UNK] [CLS] [SEP] [MASK] A C D E F G H I K L M N P Q R S T V W Y".split()  # of AntiBERTy
# variable regions of heavy chains of eight therapeutic antibodies
CHAINS = """
EVQLVESGGGLVQPGGSLRLSCAASGFNIKDTYIHWVRQAPGKGLEWVARIYPTNGYTRYADSVKGRFTISADTSKNTAYLQMNSLRAEDTAVYYCSRWGGDGFYAMDYWGQGTLVTVSS
EVQLVESGGGLVQPGRSLRLSCAASGFTFDDYAMHWVRQAPGKGLEWVSAITWNSGHIDYADSVEGRFTISRDNAKNSLYLQMNSLRAEDTAVYYCAKVSYLSTASSLDYWGQGTLVTVSS
EVQLVESGGGLVQPGGSLRLSCAASGYTFTNYGMNWVRQAPGKGLEWVGWINTYTGEPTYAADFKRRFTFSLDTSKSTAYLQMNSLRAEDTAVYYCAKYPHYYGSSHWYFDVWGQGTLVTVSS
QVQLQQPGAELVKPGASVKMSCKASGYTFTSYNMHWVKQTPGRGLEWIGAIYPGNGDTSYNQKFKGKATLTADKSSSTAYMQLSSLTSEDSAVYYCARSTYYGGDWYFNVWGAGTTVTVSA
QVQLVQSGVEVKKPGASVKVSCKASGYTFTNYYMYWVRQAPGQGLEWMGGINPSNGGTNFNEKFKNRVTLTTDSSTTTAYMELKSLQFDDTAVYYCARRDYRFDMGFDYWGQGTTVTVSS
QVQLVESGGGVVQPGRSLRLDCKASGITFSNSGMHWVRQAPGKGLEWVAVIWYDGSKRYYADSVKGRFTISRDNSKNTLFLQMNSLRAEDTAVYYCATNDDYWGQGTLVTVSS
QVQLKQSGPGLVQPSQSLSITCTVSGFSLTNYGVHWVRQSPGKGLEWLGVIWSGGNTDYNTPFTSRLSINKDNSKSQVFFKMNSLQSNDTAIYYCARALTYYDYEFAYWGQGTLVTVSA
EVQLVESGGGLVQPGGSLRLSCAVSGYSITSGYSWNWIRQAPGKGLEWVASITYDGSTNYNPSVKGRITISRDDSKNTFYLQMNSLRAEDTAVYYCARGSHYFGHWHFAVWGQGTLVTVSS
""".split()
STORIES = """
Once upon a time, there was a little girl named Lily. She loved to play outside in the park with her dog, Max. One
day, Lily and Max saw a big red ball under a tree. "Look, Max! A ball!" said Lily. Max was very happy. He ran to the
ball and picked it up. But the ball was too big for his mouth. Lily laughed and said, "Let me help you, Max." She
picked up the ball and threw it far away. Max ran and ran. He wanted to catch the ball. Then he saw a small bird on
the grass. The bird was sad because it could not fly. Max sat down next to the bird. Lily came and saw the bird too.
"Oh no, little bird, are you hurt?" she asked. Lily took the bird home to her mom. Her mom was kind and knew what to
do. She gave the bird some water and made a warm bed for it in a box. The next day, the bird felt better. It sang a
pretty song. Lily opened the window and the bird flew up into the blue sky. "Goodbye, little bird!" said Lily. She
was happy that she could help. From that day on, the bird came back every morning to sing for Lily and Max.

Once upon a time, there was a boy named Tim. Tim had a toy car. It was green and very fast. He played with it every
day. One day, Tim went to the park with his mom. He saw a girl who was crying. Her name was Sue. "Why are you sad?"
asked Tim. "I lost my doll," said Sue. Tim wanted to help her. They looked under the slide. They looked behind the
big tree. They looked in the sand. At last, Tim saw something pink in the bushes. It was the doll! Sue was so happy.
She gave Tim a big hug and said, "Thank you, Tim." Tim smiled. He let Sue play with his green car too. They became
best friends and played together all day. When it was time to go home, Tim told his mom about his new friend. His mom
was proud of him. "You were very kind today," she said. Tim felt warm and happy inside.

One day, a cat named Tom found a fish in the river. The fish was small and shiny. Tom was very hungry, and he wanted
to eat the fish. "Please do not eat me," said the fish. "If you let me go, I will show you a secret." Tom thought
about it. He liked secrets. "Okay," he said. He put the fish back into the water. The fish swam fast, and Tom walked
along the river. They went over the hill and past the old house. Then they came to a garden. In the garden there was
a tree full of sweet apples and a bowl of milk. "This is my secret," said the fish. "You can come here every day."
Tom drank all the milk and took a long nap in the sun. He was glad that he did not eat the fish. The fish was glad
too. They met in the garden every day, and they were good friends for a long time. The end.

Ben and Mia were brother and sister. They liked to build things with blocks. One rainy day they wanted to build the
tallest tower in the world. They put one block on top of the other. The tower got higher and higher. "Be careful,"
said Mia. "It might fall down." Ben did not listen. He put a very big block on top. The tower began to shake. Crash!
All the blocks fell on the floor. Ben started to cry. "It is all my fault," he said. Mia put her arm around him. "Do
not cry, Ben. We can build it again, and this time we can do it together." So they picked up the blocks. They put the
big ones at the bottom and the small ones on top. Soon the tower was taller than Ben. Their dad came into the room
and clapped his hands. "Wow, what a beautiful tower!" he said. Ben and Mia smiled. They learned that it is good to
listen and to try again.
"""


def model_inputs(name: str, prose: Path | None) -> Any:
    """Token ids or text for one of the models; None for the text that a probe takes by itself."""
    if name == "AntiBERTy":
        ids, length = {word: at for at, word in enumerate(RESIDUES)}, min(map(len, CHAINS))
        ends = ids["[CLS]"], ids["[SEP]"]
        return torch.tensor([[ends[0], *(ids[x] for x in chain[:length]), ends[1]] for chain in CHAINS])
    if name == "stories260K":
        return " ".join(STORIES.split("\n"))
    return None if prose is None or not prose.is_file() else read_text(prose)[:CHARACTERS]


STUDY = Study(
    "flags of a scan",
    CLAIMS,
    measure,
    "figures of models: --runs FILE of earlier ones, with --jobs 1 --models FOLDER to measure those that it lacks",
    on_models=True,
    on_runs=True,
    needs_data=False,
)
PAPER = Paper(
    "flags",
    "How often flags are right",
    "The flags of locater scan, held against locater probe on trained models",
    (STUDY,),
    Path(__file__).parent,
    {
        "FLAGS": FLAGS, "COLUMNS": COLUMNS, "PLANTED": PLANTED, "PLANTED_HEADS": PLANTED_HEADS, "RIGHT": RIGHT, "SILENT": SILENT,
        "CHOSEN_ON": CHOSEN_ON,
        "shown": share_text, "totals": totals,
    },
    page="flags",
    kept=("flags-heads.jsonl",),
    kinds={"construction": "a b", "experiment": "c"},
    within={(0.0, 1.0): "a b c"},
    says="How often are the flags of a scan right?",
    beliefs={
        "a2 a3 a4 b2 b3 b4": "on planted heads the flags `uniform`, `sharp` and `antisymmetric` are right and miss none that is so",
        "c1 c2": "`repels-itself` and `few-directions` would be right as flags on sound models",
    },
)  # fmt: skip

__all__ = ["PAPER"]
