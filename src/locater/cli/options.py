"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

JsonPath = Annotated[
    str | None, typer.Option("--json", metavar="PATH", help="Write the data as JSON; - for standard output.")
]
ReportPath = Annotated[
    str | None, typer.Option("--report", metavar="PATH", help="Write an HTML page that works offline.")
]
Raw = Annotated[bool, typer.Option("--raw", help="Read parameters as stored, without folding in norms.")]
Length = Annotated[int, typer.Option(metavar="N", help="Number of tokens in view, for entropy and sharpness.")]
FailOn = Annotated[
    str | None,
    typer.Option(
        metavar="CONDITIONS",
        help="Exit with status 1 if a head has one of these flags (sharp,nonfinite) or meets a comparison ('M<-1').",
    ),
]
Download = Annotated[
    bool,
    typer.Option("--download", help="Download a checkpoint that is elsewhere as a whole, in place of reading ranges."),
]
