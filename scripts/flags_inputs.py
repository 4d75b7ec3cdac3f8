"""What the models of scripts/flags.py were made for: chains of antibodies, stories for children, prose."""

from __future__ import annotations

import lzma
from pathlib import Path
from typing import Any

import torch

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


def inputs(name: str, text: Path | None) -> Any:
    """Token ids or text for one of the models; None for the text that a probe takes by itself."""
    if name == "AntiBERTy":
        ids, length = {word: at for at, word in enumerate(RESIDUES)}, min(map(len, CHAINS))
        ends = ids["[CLS]"], ids["[SEP]"]
        return torch.tensor([[ends[0], *(ids[x] for x in chain[:length]), ends[1]] for chain in CHAINS])
    if name == "stories260K":
        return " ".join(STORIES.split("\n"))
    if text is None:
        return None
    file: Any = lzma.open(text, "rt", encoding="utf-8") if text.suffix == ".xz" else text.open(encoding="utf-8")  # noqa: SIM115
    with file:
        return file.read(60_000)
