"""Parameters of the trunk: a shared state of each token, blocks that change it, and what every layer makes of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from kvx.cache.geometry import CacheGeometry
from kvx.mappers.base import EntryReport
from kvx.mappers.controls import scrambling
from kvx.mappers.linear import HIGHEST
from kvx.mappers.low_rank_params import LowRankParams, Reads, Writes
from kvx.translators.residual_params import power_of_two
from kvx.typing import host, pytree, static

FEW = 1024  # features whose weights move as fast as all others


@pytree
class Blocks:
    """N gated blocks, each causal attention, then a SwiGLU; H heads of A/H channels, W channels inside.

    Attributes:
        query_weight, key_weight, value_weight: ``[N,R,A]``; out_weight: ``[N,A,R]``; read_gate: ``[N,R]``.
        expand_weight: ``[N,R,2W]``: the W swished channels, then their factors; contract_weight: ``[N,W,R]``; gate:
            ``[N,R]``. Gates are zero before training.
        heads: H.
    """

    query_weight: Array
    key_weight: Array
    value_weight: Array
    out_weight: Array
    read_gate: Array
    expand_weight: Array
    contract_weight: Array
    gate: Array
    heads: int = static()

    @classmethod
    def create(cls, key: Array, count: int, rank: int, width: int, heads: int, head_dim: int) -> Blocks:
        """Random matrices, closed gates."""
        inner = heads * head_dim
        shapes = [(rank, inner)] * 3 + [(inner, rank), (rank, 2 * width), (width, rank)]
        keys = jax.random.split(key, len(shapes))
        drawn = [
            jax.random.normal(k, (count, *shape), jnp.float32) * shape[0] ** -0.5
            for k, shape in zip(keys, shapes, strict=True)
        ]
        query, read, value, out, expand, contract = drawn
        shut = jnp.zeros((count, rank), jnp.float32)
        return cls(query, read, value, out, shut, expand, contract, jnp.zeros_like(shut), heads)

    @property
    def matrices(self) -> tuple[Array, ...]:
        """What is multiplied with."""
        return tuple(x for x in jax.tree.leaves(self) if x.ndim == 3)

    def flops(self, tokens: int) -> int:
        """Operations of so many tokens: products, and attention to the tokens before each."""
        pairs = self.query_weight.shape[0] * 2 * self.query_weight.shape[2] * (tokens * (tokens + 1) // 2)
        return 2 * (tokens * sum(x.size for x in self.matrices) + pairs)


@pytree
class TrunkWrites:
    """Keys or values of the target layers of one group.

    Attributes:
        up: ``[L,R,K,D]`` and bias ``[L,K,D]``, in units of ``spread``.
        mean, spread: ``[L,K,D]`` of the fitted outputs; never trained. Spreads are powers of two.
        average, covariance: ``[L,K,D]`` and ``[L,K,D,D]`` of what the translator makes, for controls.
        component: 0 keys, 1 values; layers: the L target layers, ascending.
    """

    up: Array
    bias: Array
    mean: Array
    spread: Array
    average: Array
    covariance: Array
    component: int = static()
    layers: tuple[int, ...] = static()

    @classmethod
    def of(cls, one: Writes) -> TrunkWrites:
        """A closed form's outputs in units of their deviations."""
        spread = power_of_two(jnp.sqrt(jnp.maximum(jnp.diagonal(one.covariance, axis1=-2, axis2=-1), 0)))
        up = one.up.astype(jnp.float32) / spread[:, None]
        still = jnp.zeros_like(one.mean)
        return cls(up, still, one.mean, spread, one.mean, one.covariance, one.component, one.layers)

    def scrambled(self, key: Array) -> TrunkWrites:
        """Deviations from the average output times a random matrix that keeps each variance."""
        draw = scrambling(self.covariance, key)
        inner = self.spread[..., :, None] * draw / self.spread[..., None, :]
        offset = self.bias + (self.mean - self.average) / self.spread
        return dataclasses.replace(
            self,
            up=jnp.einsum("lrkd,lkdf->lrkf", self.up.astype(jnp.float32), inner, precision=HIGHEST),
            bias=jnp.einsum("lkd,lkdf->lkf", offset, inner, precision=HIGHEST),
            mean=self.average,
            covariance=jnp.einsum("lkde,lkdf,lkfg->lkeg", draw, self.covariance, draw, precision=HIGHEST),
        )

    def silenced(self) -> TrunkWrites:
        """The average output for every token."""
        up, bias, covariance = (jnp.zeros_like(x) for x in (self.up, self.bias, self.covariance))
        return dataclasses.replace(self, up=up, bias=bias, mean=self.average, covariance=covariance)


@pytree
class TrunkParams:
    """Parameters of :func:`kvx.translators.trunk`.

    Attributes:
        reads: as in :class:`kvx.mappers.low_rank_params.LowRankParams`, its weight of features divided by ``scale``.
        scale: ``[P]`` what features are divided by: their deviations, and more where there are many features, by which
            one learning rate suits all matrices; powers of two, never trained.
        blocks: what changes the state.
        writes: for each group of target layers keys, then values.
        target: geometry of the caches it makes; dtype: of them; rate: multiplier of the gates.
        report: host only: how each output of the closed form was fitted.
    """

    reads: Reads
    scale: Array
    blocks: Blocks
    writes: tuple[TrunkWrites, ...]
    target: CacheGeometry = static()
    dtype: str = static(default="float32")
    rate: float = static(default=1.0)
    report: tuple[EntryReport, ...] | None = host(default=None)

    @property
    def embeddings(self) -> int:
        """Tokens whose target embeddings are read."""
        return self.reads.embeddings

    @property
    def _read(self) -> list[Array]:
        """Arrays that a translation reads: everything but what only controls need."""
        names = ("up", "bias", "mean", "spread")
        arrays = [getattr(w, name) for w in self.writes for name in names]
        return [*arrays, self.reads.center, self.reads.weight, self.scale, *jax.tree.leaves(self.blocks)]

    @property
    def stored(self) -> int:
        """Bytes that a translation reads."""
        return sum(a.size * a.dtype.itemsize for a in self._read)

    @property
    def parameters(self) -> int:
        """Numbers that a translation reads."""
        return int(np.sum([a.size for a in self._read]))

    def flops(self, tokens: int) -> int:
        """Operations of translating so many tokens: products of each matrix, and the blocks' attention."""
        matrices = self.reads.weight.size + sum(w.up.size for w in self.writes)
        return 2 * tokens * matrices + self.blocks.flops(tokens)

    def silenced(self, key: Array) -> TrunkParams:
        """The constant control: every token gets the average output, whatever was read."""
        return dataclasses.replace(self, writes=tuple(w.silenced() for w in self.writes), report=None)

    def scrambled(self, key: Array) -> TrunkParams:
        """The random control: deviations from the average output times a random matrix that keeps each variance."""
        keys = jax.random.split(key, len(self.writes))
        writes = tuple(w.scrambled(k) for w, k in zip(self.writes, keys, strict=True))
        return dataclasses.replace(self, writes=writes, report=None)


def trunk_of(
    linear: LowRankParams, deviations: Array | None, sizes: Sequence[int], rate: float, key: Array
) -> TrunkParams:
    """The closed form in standardised features and outputs, with blocks whose gates are zero.

    Args:
        linear: the fitted map.
        deviations: ``[P]`` of its features, ``None``: one.
        sizes: number of blocks, channels of each SwiGLU, heads, channels of a head.
        rate: multiplier of the gates.
        key: of the blocks' random matrices.
    """
    reads = linear.reads
    deviations = jnp.ones_like(reads.center) if deviations is None else deviations
    # Many correlated features add up, so a step has to be smaller the more there are: by the number over FEW.
    scale = power_of_two(deviations) * power_of_two(jnp.maximum(jnp.float32(len(reads.center) / FEW), 1.0))
    weight = reads.weight.astype(jnp.float32) * scale[:, None]
    count, width, heads, head_dim = sizes
    blocks = Blocks.create(key, count, linear.rank, width, heads, head_dim)
    writes = tuple(TrunkWrites.of(one) for one in linear.writes)
    made = dataclasses.replace(reads, weight=weight)
    return TrunkParams(made, scale, blocks, writes, linear.target, linear.dtype, rate, linear.report)
