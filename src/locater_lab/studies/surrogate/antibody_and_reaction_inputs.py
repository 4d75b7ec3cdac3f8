"""Inputs of two models that read no text: antibodies and chemical reactions as token ids.

    python -m locater_lab.studies.surrogate.antibody_and_reaction_inputs antibodies thera_sabdab_humab.fa MODEL_FOLDER --vocabulary vocab.txt
    python -m locater_lab.studies.surrogate.antibody_and_reaction_inputs reactions dataSetA.csv MODEL_FOLDER

The first file is in the repository Merck/BioPhi-2021-publication, the second in connorcoley/retrosim. The model folders
are those inside the packages `antiberty` 0.1.3 and `rxnfp` 0.1.0 (bert_ft_10k_25s), unpacked. Writes inputs.txt into
the folder: sequences of nearly one length, cut to it, between [CLS] and [SEP], in a random order.
"""

from __future__ import annotations

import argparse
import csv
import random
import re
from pathlib import Path

PIECES = re.compile(r"\[[^\]]+\]|Br|Cl|>>|%\d\d|.")  # of a reaction: atoms in brackets, two letters, ring numbers
PLAIN = re.compile(r"\[(B|C|N|O|P|S|F|Cl|Br|I|c|n|o|s|p)(H\d?)?\]")  # atoms that need no brackets, but for [nH]


def antibodies(path: Path) -> tuple[str, int, list[list[str]]]:
    """What they are, their length, and heavy chains of 118 to 124 residues."""
    records = path.read_text().split(">")[1:]
    chains = {record.split("\n", 1)[1].replace("\n", "") for record in records if record.split("\n")[0].endswith("VH")}
    return "heavy chains of therapeutic antibodies", 118, [list(x) for x in sorted(chains) if 118 <= len(x) <= 124]


def reactions(path: Path) -> tuple[str, int, list[list[str]]]:
    """The same of reactions, of 123 to 134 tokens, without atom numbers."""
    with path.open() as file:
        texts = [without_numbers(row["rxn_Smiles"].strip()) for row in csv.DictReader(file)]
    return "chemical reactions", 123, [x for x in map(PIECES.findall, texts) if 123 <= len(x) <= 134]


def without_numbers(reaction: str) -> str:
    """
    >>> without_numbers("[CH3:1][c:2]1[nH:3][N+:4]")
    'Cc1[nH][N+]'
    """
    bare = re.sub(r":\d+\]", "]", reaction)
    return PLAIN.sub(lambda atom: atom[0] if atom[0] == "[nH]" else atom[1], bare)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("antibodies", "reactions"))
    parser.add_argument("file", type=Path)
    parser.add_argument("folder", type=Path, help="the model's folder")
    parser.add_argument("--vocabulary", type=Path, help="vocab.txt, where it is not in the folder")
    args = parser.parse_args()
    title, length, sequences = {"antibodies": antibodies, "reactions": reactions}[args.kind](args.file)
    words = (args.vocabulary or args.folder / "vocab.txt").read_text().splitlines()
    ids = {word: number for number, word in enumerate(words)}
    rows = [["[CLS]", *x[:length], "[SEP]"] for x in sequences]
    random.Random(0).shuffle(rows)
    lines = [" ".join(str(ids.get(word, ids["[UNK]"])) for word in row) for row in rows]
    (args.folder / "inputs.txt").write_text("\n".join([f"# {title}", *lines, ""]))
    print(f"{len(lines)} sequences of {length + 2}: {args.folder / 'inputs.txt'}")


if __name__ == "__main__":
    main()
