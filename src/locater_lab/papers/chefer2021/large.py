"""Study d: what the paper measured on large models and data sets, which are not at hand."""

from __future__ import annotations

from locater_lab.engine.claims import Claim
from locater_lab.engine.reproduction import Study

CLAIMS = (
    Claim(
        "d1", "Weakly supervised segmentation from DETR is better than by transformer attribution (13.1 against 7.2, as recalled)",
        "average precision on COCO", "at least", 7.2, by="summary",
    ),
    Claim(
        "d2", "On LXMERT and VisualBERT the area under the perturbation curves is the best of all methods (as recalled)", "area less that of the best rival",
        "at least", 0.0, by="summary",
    ),
)  # fmt: skip

STUDY = Study(
    "DETR, LXMERT, VisualBERT",
    CLAIMS,
    needs="pretrained DETR, LXMERT and VisualBERT, with COCO and VQA; none is at hand",
)
