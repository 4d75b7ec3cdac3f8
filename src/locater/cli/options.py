"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

# One name means one thing: what an option shared by several commands takes, and how its help begins.
MEANINGS = {
    "--base": ("MODEL", "Base model "),
    "--download": ("", "Download a remote checkpoint as a whole"),
    "--eigenvalues": ("", "Include the eigenvalues of every head"),
    "--fail-on": ("CONDITIONS", "Exit with status 1 if a head "),
    "--heads": ("N", "Query heads in a layer"),
    "--images": ("PATH", "Pictures "),
    "--json": ("PATH", "Write the data as JSON; - for standard output"),
    "--length": ("N", "Tokens in a sequence"),
    "--open": ("", "Open the page in a browser"),
    "--out": ("FOLDER", "Folder of "),
    "--raw": ("", "Read parameters as stored"),
    "--report": ("PATH", "Write an HTML page that works offline"),
    "--sinks": ("N", "First keys that "),
    "--shard": ("I/N", "Only part I of N of "),
    "--text": ("FILE", "Text that the model reads"),
    "--tokenizer": ("PATH", "Folder of the tokenizer"),
    "--tokens": ("N", "About how many tokens"),
    "--window": ("N", "Keys that a head sees"),
}

JsonPath = Annotated[
    str | None, typer.Option("--json", metavar="PATH", help="Write the data as JSON; - for standard output.")
]
ReportPath = Annotated[
    str | None, typer.Option("--report", metavar="PATH", help="Write an HTML page that works offline.")
]
OpenPage = Annotated[bool, typer.Option("--open", help="Open the page in a browser.")]
Raw = Annotated[bool, typer.Option("--raw", help="Read parameters as stored, without folding in norms.")]
Length = Annotated[int, typer.Option(metavar="N", help="Tokens in a sequence, for entropy and sharpness.")]
FailOn = Annotated[
    str | None,
    typer.Option(
        metavar="CONDITIONS",
        help="Exit with status 1 if a head has one of these flags (sharp,nonfinite) or meets a comparison ('M<-1').",
    ),
]
Download = Annotated[
    bool,
    typer.Option("--download", help="Download a remote checkpoint as a whole instead of reading byte ranges."),
]
