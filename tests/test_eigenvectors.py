"""No number depends on what an eigensolver may choose: signs, the order of equal values, a basis of what they share.

Solvers differ in this between processors, and between one matrix and a batch. Here they are made to choose at random.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from locater import moments, scan
from locater.control import SigmaReparam
from locater.discovery import attention_layers
from locater.measures import ranks, token_residual, top_directions
from locater.predict.prediction_and_logit_bound import predict
from locater.predict.statistics_file import Input
from locater.spectrum import Moments
from locater.theory import mixture_localization, mixture_propagation
from locater.theory.gaussian_tokens_and_covariance_root import gaussian_tokens, root
from locater_lab.theory import simulate

EQUAL = 1e-9  # of the largest: values closer than this share their vectors


def turned(values: Tensor, vectors: Tensor, draw: torch.Generator) -> Tensor:
    """The same eigenvectors (columns) in another basis: every group of equal values turned by an orthogonal matrix of
    its own.
    """
    out, start = vectors.clone(), 0
    for end in range(1, len(values) + 1):
        if end == len(values) or abs(values[end] - values[end - 1]) > EQUAL * values.abs().max():
            noise = torch.randn(end - start, end - start, dtype=torch.float64, generator=draw)
            turn = torch.linalg.qr(noise).Q * torch.randn(end - start, dtype=torch.float64, generator=draw).sign()
            out[:, start:end] = vectors[:, start:end] @ turn.to(vectors)
            start = end
    return out


def each(matrices: Tensor, function: Callable[[int], Tensor]) -> Tensor:
    """`function` of the number of every matrix of a batch, in the batch's shape."""
    parts = [function(i) for i in range(matrices.flatten(0, -3).shape[0] if matrices.ndim > 2 else 1)]
    return torch.stack(parts).reshape(*matrices.shape[:-2], *parts[0].shape) if parts else matrices


@contextmanager
def other_choices(seed: int) -> Iterator[None]:
    """Solvers that give other vectors, and other orders, of the same right answers."""
    draw = torch.Generator().manual_seed(seed)
    solvers = {name: getattr(torch.linalg, name) for name in ("eigh", "svd", "eigvals")}

    def eigh(A: Tensor, *args: Any) -> Any:
        found = solvers["eigh"](A, *args)
        flat = found.eigenvalues.reshape(-1, A.shape[-1]), found.eigenvectors.reshape(-1, *A.shape[-2:])
        return torch.return_types.linalg_eigh(
            (found.eigenvalues, each(A, lambda i: turned(flat[0][i], flat[1][i], draw)))
        )

    def svd(A: Tensor, full_matrices: bool = True) -> Any:
        U, s, Vh = solvers["svd"](A, full_matrices=full_matrices)
        signs = torch.randn(s.shape, dtype=s.dtype, generator=draw).sign()
        U, Vh = U.clone(), Vh.clone()
        U[..., : s.shape[-1]] *= signs.unsqueeze(-2)
        Vh[..., : s.shape[-1], :] *= signs.unsqueeze(-1)
        return torch.return_types.linalg_svd((U, s, Vh))

    def eigvals(A: Tensor) -> Tensor:
        found = solvers["eigvals"](A)
        return found[..., torch.randperm(A.shape[-1], generator=draw)]

    with pytest.MonkeyPatch.context() as patch:
        for name, solver in (("eigh", eigh), ("svd", svd), ("eigvals", eigvals)):
            patch.setattr(torch.linalg, name, solver)
        yield


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def heads(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Six heads: two of full rank, one of low rank, one symmetric, one a projector (all values equal), one of zeros."""
    q, k = normal(6, 3, 10, seed=seed), normal(6, 3, 10, seed=seed + 1)
    q[2, 1:], k[2, 2] = 0, k[2, 0]
    k[3] = q[3]
    q[4] = k[4] = torch.eye(3, 10, dtype=torch.float64)
    q[5] = 0
    return q, k


def model(scale: float = 3.0) -> nn.Module:
    """Heads of few directions in the first layer, where the mixture is used, and a rank-deficient one."""
    torch.manual_seed(0)
    made = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 16, batch_first=True), 2).double()
    with torch.no_grad():
        maps = made.layers[0].self_attn.in_proj_weight
        maps[16:32] = maps[:16]  # keys are queries: positive values, a large skew
        maps[:32] *= scale
        maps[1:4] = 0  # one direction
    return made


def singular() -> Tensor:
    """Indefinite by more than any jitter covers, so that there is no Cholesky factor and eigenvectors are asked."""
    x = normal(3, 8)
    return x.mT @ x - 0.1 * torch.eye(8, dtype=torch.float64)


def read(number: Callable[[], Any]) -> dict[str, Tensor]:
    found = number()
    return found if isinstance(found, dict) else {"": found}


def of_scan() -> dict[str, Tensor]:
    rows = scan(model(), details=True).rows
    assert {row.approximation for row in rows} == {"mixture", "gaussian"}
    names = "trace M S F mean variance concentration skew spectral_norm stable_rank localization residual_kept".split()
    found = {name: torch.tensor([getattr(row, name) for row in rows], dtype=torch.float64) for name in names}
    found["eigenvalues"] = torch.tensor([row.eigenvalues for row in rows], dtype=torch.float64)
    return found | {
        f"profile {row.head}": torch.tensor(row.profile, dtype=torch.float64) for row in rows if row.profile
    }


def of_moments() -> dict[str, Tensor]:
    m = moments(*heads())
    squares = m.singular_values().square()  # what is computed: the root of a zero that is rounded is 1e-8
    return {
        "singular": squares,
        "rank": m.stable_rank,
        "eigenvalues": torch.view_as_real(m.eigenvalues()),
        "kappa": m.concentration,
    }


def of_predictions() -> dict[str, Tensor]:
    layer = next(iter(attention_layers(model().float())))
    given = Input(
        0,
        "",
        "self",
        16,
        normal(16).float(),
        torch.block_diag(singular(), singular()).float(),
        normal(16, seed=3).float(),
    )
    return predict(layer, given, 12, sequences=4)


def of_measures() -> dict[str, Tensor]:
    x = normal(2, 7, 5)
    found = ranks(x)
    directions = top_directions(normal(5), normal(5, 5) @ normal(5, 5).mT, 3)
    residual = token_residual(x, centre="svd")
    return {
        "stable": found.stable,
        "effective": found.effective,
        "principal": directions.principal,
        "residual": residual,
    }


def of_control() -> Tensor:
    held = model()
    control = SigmaReparam(gamma="spectral").attach(held)
    found = torch.stack([part.gamma.detach().double() for part in control.parts])
    control.detach()
    return found


NUMBERS: dict[str, Callable[[], Any]] = {
    "mixture": lambda: mixture_propagation(moments(*heads()), 2.0, 12, draws=64),
    "mixture, one value": lambda: mixture_propagation(
        Moments(*[torch.eye(4, dtype=torch.float64)] * 3), 1.0, 12, draws=64
    ),
    "mixture, localization": lambda: mixture_localization(moments(*heads()), 2.0, draws=64),
    "walk": lambda: (
        simulate(
            *(x[0] for x in heads()), 0.5, 6, walks=50, covariance=torch.block_diag(singular(), torch.eye(2))
        ).softmax
    ),
    "tokens": lambda: gaussian_tokens(normal(8), singular(), 2, 3),
    "root": lambda: root(singular()),
    "scan": of_scan,
    "moments": of_moments,
    "predictions": of_predictions,
    "measures": of_measures,
    "sigma-reparam": of_control,
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_do_not_depend_on_what_a_solver_chooses(name: str) -> None:
    plain = read(NUMBERS[name])
    for seed in (0, 1):
        with other_choices(seed):
            again = read(NUMBERS[name])
        for part, value in plain.items():
            # roots of a singular matrix have half of the digits
            tolerance = 1e-5 if value.dtype == torch.float32 else 1e-7
            assert torch.allclose(again[part], value, rtol=tolerance, atol=tolerance, equal_nan=True), part


def test_the_mixture_does_not_depend_on_the_heads_beside_it() -> None:
    """Also of a rank that rounding decides, and at single precision."""
    q, k = heads()
    for kind, tolerance in ((torch.float64, 1e-7), (torch.float32, 1e-4)):
        together = mixture_propagation(moments(q.to(kind), k.to(kind)), 2.0, 12, draws=64)
        alone = torch.stack(
            [mixture_propagation(moments(q[i].to(kind), k[i].to(kind)), 2.0, 12, draws=64) for i in range(len(q))]
        )
        torch.testing.assert_close(together, alone, rtol=0, atol=tolerance)


def test_the_mixture_knows_the_map_and_not_its_factors() -> None:
    """W is the same when queries are small and keys as much larger; a root of both has the digits of the larger."""
    q, k = heads()
    plain = mixture_propagation(moments(q, k), 2.0, 12, draws=64)
    for factor in (1e-9, 1e5):
        torch.testing.assert_close(
            mixture_propagation(moments(factor * q, k / factor), 2.0, 12, draws=64), plain, rtol=0, atol=1e-6
        )


@pytest.mark.parametrize("rank", [63, 64])
def test_rounding_does_not_decide_which_root_a_covariance_has(rank: int) -> None:
    """Behind a LayerNorm one direction is missing, and the last bits tell whether there is a Cholesky factor."""
    x = normal(rank, 64)
    covariance = x.mT @ x / rank

    def tokens(seed: int) -> Tensor:
        rounded = covariance * (1 + 6e-8 * normal(64, 64, seed=seed))
        return gaussian_tokens(torch.zeros(64), ((rounded + rounded.mT) / 2).float(), 2, 8)

    first = tokens(1)
    assert max((tokens(seed) - first).abs().max().item() for seed in range(2, 14)) < 5e-4
