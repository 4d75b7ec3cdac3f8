"""Moments and eigenvalues of a head's query-key map W = W_Q^T W_K, without ever forming it.

W is d x d, but its rank is at most d_head. Everything that the theory needs is a function of three small matrices,
d_head x d_head, in the inner product of a token covariance C (the identity by default):

    G = W_K C W_Q^T        A = W_Q C W_Q^T        B = W_K C W_K^T

Section numbers refer to docs/theory.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Complex, Float
from torch import Tensor

from locater.errors import LocaterError
from locater.markup import display, heat_map, range_table, range_words
from locater.numerics import finite_or_none, spread_over_workers, upcast

Batched = Float[Tensor, "*heads"]
# Eigenvalues whose moduli differ by fewer than this many rounding errors of the largest count as equal; solvers make up
# to 52 such errors.
TIED = 64
# |log2 ||W||^2| above which cubes of W, or their digits, leave the range of float32.
SINGLE = 60


@dataclass(frozen=True, repr=False)
class Moments:
    """The three small matrices of a batch of heads. Every moment is computed from them on first use.

    With C = I the names read as written; otherwise W stands for W C in traces and for C^(1/2) W C^(1/2) in norms.
    `cross` is None for cross-attention, where queries and keys are in different spaces. Traces mean nothing there, and
    reading one raises.
    """

    query_gram: Float[Tensor, "*heads h h"]  # A
    key_gram: Float[Tensor, "*heads h h"]  # B
    cross: Float[Tensor, "*heads h h"] | None  # G

    def __repr__(self) -> str:
        """Shapes and ranges, in one line.

        >>> moments(torch.eye(2, 3), torch.eye(2, 3))
        Moments(1 head of size 2, float32, trace 2, frobenius_sq 2, concentration 1)
        """
        ranges = (f"{name} {range_words(values)}" for name, values in self._shown().items())
        return f"Moments({', '.join([self._shape(), *ranges])})"

    def _repr_html_(self) -> str:
        """What a notebook shows: the map of the first number over heads, and the ranges of all."""
        shown = self._shown()
        if not shown:
            return display("Moments", [f"{self._shape()}."])
        name, values = next(iter(shown.items()))
        width = max(1, self.query_gram.shape[-3]) if self.query_gram.ndim > 2 else 1
        rows = [values[i : i + width] for i in range(0, len(values), width)]
        return display(
            "Moments", [f"{self._shape()}."], heat_map(rows, name, rows="row", columns="head"), range_table(shown)
        )

    def _shape(self) -> str:
        """`12 x 8 heads of size 64, float32 on cuda:0`."""
        heads = " x ".join(map(str, self.query_gram.shape[:-2])) or "1"
        device, dtype = self.query_gram.device, str(self.query_gram.dtype).removeprefix("torch.")
        where = "" if device.type == "cpu" else f" on {device}"
        kind = " of cross-attention" if self.cross is None else ""
        return f"{heads} head{'s' * (heads != '1')} of size {self.head_dim}{kind}, {dtype}{where}"

    def _shown(self) -> dict[str, list[float | None]]:
        """The numbers of a display, head after head; None where one is not finite. Empty for tensors without data."""
        if type(self.query_gram) is not Tensor or self.query_gram.is_meta:
            return {}
        names = ("frobenius_sq",) if self.cross is None else ("trace", "frobenius_sq", "concentration")
        columns = {name: getattr(self, name).detach().cpu().double().flatten().tolist() for name in names}
        return {name: [finite_or_none(x) for x in values] for name, values in columns.items()}

    @property
    def head_dim(self) -> int:
        return int(self.query_gram.shape[-1])

    @property
    def gram(self) -> Float[Tensor, "*heads h h"]:
        """G = W_K C W_Q^T, whose eigenvalues are the non-zero eigenvalues of W C."""
        if self.cross is None:
            raise ValueError("traces and eigenvalues mean nothing for cross-attention: its query and key spaces differ")
        return self.cross

    @cached_property
    def trace(self) -> Batched:
        """tr W = tr G."""
        return _trace(self.gram)

    @cached_property
    def trace_of_square(self) -> Batched:
        """tr W^2 = sum(G * G^T); negative where rotation outweighs stretching."""
        return _inner(self.gram, self.gram.mT)

    @cached_property
    def frobenius_sq(self) -> Batched:
        """||W||_F^2 = sum(A * B)."""
        return _inner(self.query_gram, self.key_gram)

    @cached_property
    def symmetric_sq(self) -> Batched:
        """tr W_sym^2 = (tr W^2 + ||W||_F^2) / 2, for W_sym = (W + W^T) / 2."""
        return (self.trace_of_square + self.frobenius_sq) / 2

    @cached_property
    def symmetric_cube(self) -> Batched:
        """tr W_sym^3 = (tr G^3 + 3 tr(G B A)) / 4."""
        g = self.gram
        return (_inner(g @ g, g.mT) + 3 * _inner(g, (self.key_gram @ self.query_gram).mT)) / 4

    @cached_property
    def _sizes(self) -> tuple[Tensor, Tensor]:
        """The powers of two nearest to the sizes of W_Q and of W_K."""
        return _size(self.query_gram), _size(self.key_gram)

    @property
    def size(self) -> Batched:
        """A power of two near |W_Q| |W_K|, 1 for a zero map. Numbers without a scale are computed from W / size."""
        return self._sizes[0] * self._sizes[1]

    @cached_property
    def unit(self) -> Moments:
        """Moments of W / size. Their squares and cubes stay in the range of float32 for weights from 1e-17 to 1e17."""
        query, key = (x[..., None, None] for x in self._sizes)
        cross = None if self.cross is None else self.cross / query / key
        return Moments(self.query_gram / query / query, self.key_gram / key / key, cross)

    @property
    def mean(self) -> Batched:
        """Mean eigenvalue over the d_head directions a head can use: tr W / d_head."""
        return self.trace / self.head_dim

    @property
    def variance(self) -> Batched:
        """tr(W_sym^2) / d_head - mean^2, never negative. It is taken over the d_head directions that the head can use:
        over all d, a low-rank map could never be concentrated.
        """
        return (self.symmetric_sq / self.head_dim - self.mean**2).clamp_min(0)

    @property
    def concentration(self) -> Batched:
        """sign(tr W) (tr W)^2 / (d_head (2 ||W||_F^2 + tr W^2) / 3), in [-1, 1].

        For symmetric W this is mean^2 / (mean^2 + variance); it is 1 only for a positive multiple of a rank-d_head
        projector and 0 for a zero map.
        """
        unit = self.unit
        spread = self.head_dim * (2 * unit.frobenius_sq + unit.trace_of_square) / 3
        kappa = unit.trace * unit.trace.abs() / spread.clamp_min(torch.finfo(spread.dtype).tiny)
        return kappa.clamp(-1, 1)

    @property
    def skew(self) -> Batched:
        """g1 = sqrt(8) tr(W_sym^3) / tr(W_sym^2)^(3/2): skewness of the quadratic form y^T W y, y normal."""
        scale = self.unit.symmetric_sq.clamp_min(0) ** 1.5
        return torch.where(scale > 0, math.sqrt(8) * self.unit.symmetric_cube / scale, torch.zeros_like(scale))

    @property
    def spectral_norm(self) -> Batched:
        """Largest singular value of W."""
        return self._singular_values[..., 0]

    @property
    def stable_rank(self) -> Batched:
        """||W||_F^2 / ||W||_2^2, in [1, d_head]; 0 for a zero map. Without a gradient, like `singular_values`."""
        top = (self.spectral_norm / self.size) ** 2
        return torch.where(top > 0, self.unit.frobenius_sq.detach() / top, torch.zeros_like(top))

    @property
    def effective_rank(self) -> Batched:
        """exp(-sum p log p) with p = s / sum s over the singular values s of W, in [1, d_head]; 0 for a zero map.

        It counts every direction by its share, where the stable rank measures all against the largest: of singular
        values s_1 >= s_2 >= ... it is never below the stable rank. Without a gradient.

        >>> W_Q = torch.diag(torch.tensor([1.0, 1.0, 0.0]))
        >>> round(moments(W_Q, W_Q).effective_rank.item(), 6)
        2.0
        """
        s = self._singular_values
        total = s.sum(-1)
        p = s / torch.where(total > 0, total, torch.ones_like(total))[..., None]
        return torch.where(total > 0, torch.special.entr(p).sum(-1).exp(), torch.zeros_like(total))

    @cached_property
    def _singular_values(self) -> Float[Tensor, "*heads h"]:
        return self.singular_values()

    def singular_values(self) -> Float[Tensor, "*heads h"]:
        """All d_head singular values of W, largest first: square roots of the eigenvalues of L^T B L with A = L L^T.

        Computed in float64, because squaring the singular values costs half of the digits. On the CPU, because PyTorch
        hands matrices of more than 32 rows to CUDA one by one.
        """
        values = spread_over_workers(_singular_values, _on_cpu(self.query_gram), _on_cpu(self.key_gram))
        return values.to(self.query_gram.dtype).to(self.query_gram.device)

    def eigenvalues(self) -> Complex[Tensor, "*heads h"]:
        """The d_head eigenvalues of W that can be non-zero, by decreasing modulus; on the CPU.

        Where moduli are equal up to rounding, as in a conjugate pair, the larger real part comes first, then the larger
        imaginary part. The order therefore does not depend on the solver.
        """
        return spread_over_workers(_eigenvalues, _on_cpu(self.gram))

    def scaled(self, factor: float) -> Moments:
        """Moments of factor * W."""
        size = abs(factor)
        return Moments(
            self.query_gram * size, self.key_gram * size, None if self.cross is None else self.cross * factor
        )

    def cpu(self) -> Moments:
        """These moments on the CPU."""
        return Moments(self.query_gram.cpu(), self.key_gram.cpu(), None if self.cross is None else self.cross.cpu())

    def select(self, index: Tensor | slice | int) -> Moments:
        """These moments for some of the heads (first leading axis)."""
        return Moments(self.query_gram[index], self.key_gram[index], None if self.cross is None else self.cross[index])


def moments(
    W_Q: Float[Tensor, "*q h d"],
    W_K: Float[Tensor, "*k h d"],
    covariance: Float[Tensor, "*covariance"] | None = None,
) -> Moments:
    """Moments of W = W_Q^T W_K (times a token covariance), batched over any leading axes that broadcast.

    `covariance` is None (identity), (d,) for a diagonal or (d, d). Half-precision inputs are converted to float32
    first; float64 stays float64. Grouped-query heads need no copy of the keys: pass queries as
    (kv_heads, group, d_head, d) and keys as (kv_heads, 1, d_head, d).

    >>> W_Q = torch.tensor([[1.0, 0.0, 0.0], [0.0, 2.0, 0.0]])
    >>> m = moments(W_Q, W_Q)          # W = diag(1, 4, 0)
    >>> m.trace.item(), m.frobenius_sq.item(), m.mean.item(), m.variance.item()
    (5.0, 17.0, 2.5, 2.25)
    """
    if W_Q.shape[-2:] != W_K.shape[-2:]:
        raise LocaterError(f"W_Q has shape {list(W_Q.shape)} and W_K {list(W_K.shape)}: both end in (head size, width)")
    q, k = upcast(W_Q), upcast(W_K)
    dtype = torch.promote_types(q.dtype, k.dtype)
    q, k = q.to(dtype), k.to(dtype)
    # autocast in a training step would compute the products in half precision
    with torch.autocast(q.device.type, enabled=False):
        q_c, k_c = (q, k) if covariance is None else (_times(q, covariance), _times(k, covariance))
        query_gram, key_gram, gram = q_c @ q.mT, k_c @ k.mT, _grouped_product(k_c, q)
    shape = gram.shape
    single = Moments(query_gram.expand(shape), key_gram.expand(shape), gram)
    return moments(q.double(), k.double(), covariance) if _needs_double(single, q, k) else single


def cross_moments(W_Q: Float[Tensor, "*q h d"], W_K: Float[Tensor, "*k h e"]) -> Moments:
    """The moments that exist for cross-attention: the Frobenius norm and the singular values.

    >>> cross_moments(torch.eye(2, 3), 2 * torch.eye(2, 4)).frobenius_sq.item()     # widths 3 and 4
    8.0
    """
    q, k = upcast(W_Q), upcast(W_K)
    dtype = torch.promote_types(q.dtype, k.dtype)
    query_gram, key_gram = q.to(dtype) @ q.to(dtype).mT, k.to(dtype) @ k.to(dtype).mT
    shape = torch.broadcast_shapes(query_gram.shape, key_gram.shape)
    single = Moments(query_gram.expand(shape), key_gram.expand(shape), None)
    return cross_moments(q.double(), k.double()) if _needs_double(single, q, k) else single


def join_moments(parts: Sequence[Moments]) -> Moments:
    """The moments of blocks of heads, one after the other along the first axis."""
    if len(parts) == 1:
        return parts[0]
    crosses = [part.cross for part in parts if part.cross is not None]
    cross = None
    if crosses:  # in the memory order of the blocks: products of matrices in another order round otherwise
        ordered = crosses[0].is_contiguous()
        cross = torch.cat(crosses) if ordered else torch.cat([x.mT for x in crosses]).mT
    query_gram, key_gram = (
        torch.cat(grams) for grams in zip(*((p.query_gram, p.key_gram) for p in parts), strict=True)
    )
    return Moments(query_gram, key_gram, cross)


def lost_in_float32(m: Moments) -> Bool[Tensor, "*heads"]:
    """Heads whose moments need float64: W is much smaller than its factors, or its squares and cubes leave the range
    of float32.

    This is rare: queries and keys that use nearly separate channels, or weights below 1e-6 or above 1e3. A head that is
    zero or not finite is not among them.

    >>> W = torch.tensor([1.0, 1e-8])[:, None, None] * torch.eye(2)     # two heads
    >>> lost_in_float32(moments(W, W))
    tensor([False,  True])
    """
    return _lost(m, _factors(m))


def _factors(m: Moments) -> Tensor:
    """||A||_F ||B||_F, an upper bound of ||W||_F^2, in float64, whose range is wide enough."""
    query, key = (torch.linalg.vector_norm(x, dim=(-2, -1), dtype=torch.float64) for x in (m.query_gram, m.key_gram))
    return query * key


def _lost(m: Moments, factors: Tensor) -> Tensor:
    size = factors.log2().abs()  # infinite for a head that is zero or not finite
    return (m.frobenius_sq < 1e-3**0.5 * factors) | ((size > SINGLE) & (size < math.inf))


def _needs_double(m: Moments, q: Tensor, k: Tensor) -> bool:
    """Whether float32 is not enough.

    Always False in training and on a GPU: the check would make the GPU wait and break a compiled graph.
    """
    if (
        m.query_gram.dtype != torch.float32
        or m.query_gram.device.type != "cpu"
        or m.query_gram.requires_grad
        or m.key_gram.requires_grad
    ):
        return False
    factors = _factors(m)
    lost, zero = _lost(m, factors), factors == 0
    if not bool((lost | zero).any()):
        return False
    nonzero = [(w != 0).any(-1).any(-1) for w in (q, k)]
    return bool((lost | (zero & nonzero[0] & nonzero[1])).any())  # weights whose squares underflow to 0


def _size(gram: Tensor) -> Tensor:
    """The power of two below the root of the largest diagonal entry; 1 where that entry is 0 or not finite.

    It has no gradient: it cancels in the end.
    """
    top = gram.detach().diagonal(dim1=-2, dim2=-1).amax(-1)
    return torch.exp2((torch.where((top > 0) & top.isfinite(), top, 1).log2() / 2).floor())


def _eigenvalues(G: Tensor) -> Tensor:
    """In the order of `Moments.eigenvalues`."""
    values, size = torch.linalg.eigvals(G), torch.finfo(G.dtype)
    step = values.abs().amax(-1, keepdim=True).clamp_min(size.tiny) * TIED * size.eps
    group = torch.zeros_like(values, dtype=torch.long)  # values with the same number are equal so far
    for key in (torch.abs, torch.real, torch.imag):
        order = key(values).argsort(dim=-1, descending=True, stable=True)
        order = order.gather(-1, group.gather(-1, order).argsort(dim=-1, stable=True))
        values, group = values.gather(-1, order), group.gather(-1, order)
        apart = (-key(values).diff(dim=-1) > step) | (group.diff(dim=-1) > 0)
        group = torch.nn.functional.pad(apart.long().cumsum(-1), (1, 0))
    return values


def _singular_values(A: Tensor, B: Tensor) -> Tensor:
    A, B = A.double(), B.double()
    root, failed = torch.linalg.cholesky_ex(A)  # A = root root^T
    if failed.any():  # a rank-deficient head: eigenvectors give a root at ten times the cost
        values, vectors = torch.linalg.eigh(A)
        root = vectors * values.clamp_min(0).sqrt().unsqueeze(-2)
    return torch.linalg.eigvalsh(root.mT @ B @ root).flip(-1).clamp_min(0).sqrt()


def _grouped_product(k: Tensor, q: Tensor) -> Tensor:
    """k @ q^T. Where the query heads of a group share one key head, one product per group without copies of the key."""
    if k.ndim == q.ndim and k.ndim >= 3 and k.shape[-3] == 1 and q.shape[-3] > 1:
        group, h, d = q.shape[-3:]
        flat = q.reshape(*q.shape[:-3], group * h, d) @ k.squeeze(-3).mT  # (..., group*h, h_k), transposed G
        return flat.unflatten(-2, (group, h)).mT
    return k @ q.mT


def _times(w: Tensor, covariance: Tensor) -> Tensor:
    c = covariance.to(w)
    return w * c if c.ndim == 1 else w @ c


def _on_cpu(x: Tensor) -> Tensor:
    return x.detach().cpu()


def _trace(x: Tensor) -> Tensor:
    return x.diagonal(dim1=-2, dim2=-1).sum(-1)


def _inner(x: Tensor, y: Tensor) -> Tensor:
    return (x * y).sum((-2, -1))
