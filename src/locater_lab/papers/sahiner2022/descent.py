"""The problem in heads, descended to a local minimum: many starts and many problems at once.

Two ways. Newton's method goes to the bottom of the valley it starts in, so that a distance from the convex optimum is
that of a stationary point. Adam is how such a layer is trained.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from locater_lab.papers.sahiner2022.convex import Design


@dataclass(frozen=True)
class Problems:
    """P problems of one shape."""

    phi: Float[Tensor, "P rows gates pairs d"]
    y: Float[Tensor, "P rows c"]
    b: float

    @classmethod
    def of(cls, parts: list[tuple[Design, Tensor]], b: float) -> Problems:
        return cls(torch.stack([phi for phi, _ in parts]), torch.stack([y for _, y in parts]), b)

    def repeated(self, starts: int) -> Problems:
        return Problems(self.phi.repeat_interleave(starts, 0), self.y.repeat_interleave(starts, 0), self.b)

    def per_head(self, heads: int) -> Float[Tensor, "P rows m pairs d"]:
        """Phi of each head's gate; heads take the gates in turn."""
        return self.phi[:, :, torch.arange(heads) % self.phi.shape[2]]


@dataclass(frozen=True)
class Heads:
    """Maps (P, m, pairs) and values (P, m, d, c) of every problem, and their objectives."""

    maps: Float[Tensor, "P m pairs"]
    values: Float[Tensor, "P m d c"]
    objective: Float[Tensor, " P"]


def first_heads(problems: Problems, heads: int, seed: int, scale: float = 0.3) -> tuple[Tensor, Tensor]:
    P, _, _, pairs, d = problems.phi.shape
    g = torch.Generator().manual_seed(seed)
    shape = (P, heads, d, problems.y.shape[2])
    maps = scale * torch.randn(P, heads, pairs, generator=g, dtype=torch.float64)
    return maps, scale * torch.randn(*shape, generator=g, dtype=torch.float64)


def lifted(problems: Problems, maps: Tensor, values: Tensor) -> Float[Tensor, "P gates pairs d c"]:
    """Z of every problem's heads."""
    gates = problems.phi.shape[2]
    each = torch.einsum("zmp,zmlc->zmplc", maps, values)
    empty = torch.zeros(len(each), gates, *each.shape[2:], dtype=each.dtype)
    return empty.index_add(1, torch.arange(each.shape[1]) % gates, each)


def residuals(problems: Problems, maps: Tensor, values: Tensor) -> Float[Tensor, "P rows c"]:
    """Errors of the heads' output."""
    P, rows = problems.phi.shape[:2]
    Z = lifted(problems, maps, values)
    return problems.phi.reshape(P, rows, -1) @ Z.reshape(P, -1, Z.shape[-1]) - problems.y


def objectives(problems: Problems, maps: Tensor, values: Tensor) -> Float[Tensor, " P"]:
    squares = maps.square().flatten(1).sum(1) + values.square().flatten(1).sum(1)
    return (residuals(problems, maps, values).square().flatten(1).sum(1) + problems.b * squares) / 2


def trained(problems: Problems, heads: int, seed: int, steps: int, rate: float = 0.03) -> Heads:
    """Adam on whole problems; the rate falls to 0 in a straight line."""
    maps, values = (x.requires_grad_() for x in first_heads(problems, heads, seed))
    optimizer = torch.optim.Adam([maps, values], lr=rate)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = rate * (1 - step / steps)
        optimizer.zero_grad()
        objectives(problems, maps, values).sum().backward()
        optimizer.step()
    with torch.no_grad():
        return Heads(maps.detach(), values.detach(), objectives(problems, maps, values))


def jacobian(phi: Tensor, maps: Tensor, values: Tensor) -> Float[Tensor, "P outputs parameters"]:
    """Of every output (rows, c) by every entry of maps (m, pairs), then of values (m, d, c)."""
    P, rows, m, pairs, d = phi.shape
    c = values.shape[3]
    by_maps = torch.einsum("zrmpl,zmlc->zrcmp", phi, values).reshape(P, rows * c, m * pairs)
    one = torch.einsum("zrmpl,zmp->zrml", phi, maps)
    eye = torch.eye(c, dtype=phi.dtype)
    by_values = torch.einsum("zrml,ce->zrcmle", one, eye).reshape(P, rows * c, m * d * c)
    return torch.cat([by_maps, by_values], 2)


def hessian(
    phi: Tensor, maps: Tensor, values: Tensor, left: Tensor, b: float
) -> Float[Tensor, "P parameters parameters"]:
    """Of the objective; `left` are the errors. The output is linear in maps and in values, so that their mixed part alone
    is added to J^T J + b: Phi^T left, within a head.
    """
    P, _, m, pairs, d = phi.shape
    c = values.shape[3]
    J = jacobian(phi, maps, values)
    mixed = torch.einsum("zrmpl,zrc,mk->zmpklc", phi, left, torch.eye(m, dtype=phi.dtype)).reshape(
        P, m * pairs, m * d * c
    )
    size = m * pairs
    total = J.mT @ J
    total[:, :size, size:] += mixed
    total[:, size:, :size] += mixed.mT
    return total + b * torch.eye(total.shape[1], dtype=phi.dtype)


def descended(problems: Problems, heads: int, seed: int, steps: int) -> Heads:
    """Newton's method, damped. Where the damped Hessian is not positive or the objective would rise, a problem stays
    where it is and is damped more.
    """
    phi = problems.per_head(heads)
    maps, values = first_heads(problems, heads, seed)
    P, b = len(maps), problems.b
    size = maps[0].numel()
    damping = torch.ones(P, dtype=torch.float64)
    now = objectives(problems, maps, values)
    for _ in range(steps):
        left = residuals(problems, maps, values)
        flat = torch.cat([maps.flatten(1), values.flatten(1)], 1)
        slope = torch.einsum("zor,zo->zr", jacobian(phi, maps, values), left.flatten(1)) + b * flat
        if float(slope.abs().amax()) < 1e-9:
            break
        curve = hessian(phi, maps, values, left, b) + torch.diag_embed(damping[:, None].expand_as(flat))
        root, wrong = torch.linalg.cholesky_ex(curve)
        moved = flat - torch.cholesky_solve(slope[..., None], root)[..., 0]
        new = moved[:, :size].reshape(maps.shape), moved[:, size:].reshape(values.shape)
        then = objectives(problems, *new)
        better = (wrong == 0) & (then < now)
        maps = torch.where(better[:, None, None], new[0], maps)
        values = torch.where(better[:, None, None, None], new[1], values)
        now = torch.where(better, then, now)
        damping = torch.where(better, damping / 4, damping * 3).clamp(1e-9, 1e6)
    return Heads(maps, values, now)
