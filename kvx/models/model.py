"""A model as a value: weights (leaves), configuration (static), tokenizer and provenance (host only)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from kvx.errors import KvxError
from kvx.models.config import ModelConfig
from kvx.typing import host, pytree, static

if TYPE_CHECKING:
    from kvx.cache.provenance import Provenance
    from kvx.models.tokenizer import Encoding, Tokenizer


@pytree
class Model:
    """A decoder ready to run; pass it to jitted functions like any array.

    Attributes:
        params: weights. ``embed [V,M]``; ``positions [N,M]`` (learned positions only); ``final_norm {scale, bias?}``;
            ``head [V,M]`` unless tied; ``layers``: one dict whose leaves are stacked ``[L,...]`` (scanned), or a tuple
            of L dicts (unrolled; on CPUs decoding is about 1.5x faster). Per layer: ``attn_norm``, ``mlp_norm``
            ``{scale [M], bias?}``; ``wq [H,D,M]``, ``wk [K,D,M]``, ``wv [K,D,M]``, ``wo [M,H,D]``; ``bq``, ``bk``,
            ``bv``, ``bo`` when present; ``q_norm``, ``k_norm`` ``{scale [D]}``; ``post_attn_norm``,
            ``post_mlp_norm``; ``gate [F,M]`` (gated only), ``up [F,M]``, ``down [M,F]``, ``b_up``, ``b_down``.
        config: static facts.
        tokenizer: host only; ``None`` after JAX has taken the model apart.
        provenance: host only; weight and tokenizer digests.
    """

    params: dict[str, Any]
    config: ModelConfig = static()
    tokenizer: Tokenizer | None = host(default=None)
    provenance: Provenance | None = host(default=None)

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of the weights and of the activations."""
        return self.params["embed"].dtype

    @property
    def stacked(self) -> bool:
        """Whether layer weights are stacked ``[L,...]`` and scanned."""
        return isinstance(self.params["layers"], dict)

    def __repr__(self) -> str:
        leaves = jax.tree.leaves(self.params)
        millions = sum(x.size for x in leaves) / 1e6
        c = self.config
        return (
            f"Model({c.family}, {millions:,.1f} M parameters, {leaves[0].dtype}, {c.num_layers} layers, "
            f"{c.heads} heads / {c.kv_heads} kv heads x {c.head_dim}, vocabulary {c.vocab_size:,}, "
            f"{'stacked' if self.stacked else 'unrolled'}, {self.tokenizer!r})"
        )

    def _tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise KvxError(
                "this model has no tokenizer (a jitted or tree-mapped model loses it); encode with the model that "
                "load_model returned, or pass tokenizer= to load_model."
            )
        return self.tokenizer

    def encode(self, text: str, *, bos: bool | None = None) -> Encoding:
        """Tokens of ``text`` with character offsets; see :class:`kvx.models.tokenizer.Encoding`.

        Args:
            text: one text.
            bos: whether BOS comes first; ``None``: as the model wants for a text of its own (what ``kvx.align``
                expects of a source cache). Pass ``False`` for a boundary, which continues a cache.
        """
        return self._tokenizer().encode(text, bos=bos)

    def decode(self, tokens: Sequence[int] | jax.Array) -> str:
        """Text of a row of token ids; negative ids (padding) are dropped."""
        return self._tokenizer().decode(tokens)

    def at_length(self, tokens: int) -> Model:
        """The same model with the longest sequence length recorded, for dynamic NTK RoPE; others are unchanged."""
        return dataclasses.replace(self, config=self.config.at_length(tokens))

    def unstack(self) -> Model:
        """The same model with per-layer weights (Python loop over layers)."""
        if not self.stacked:
            return self
        layers = self.params["layers"]
        split = tuple(jax.tree.map(lambda x, i=i: x[i], layers) for i in range(self.config.num_layers))
        return dataclasses.replace(self, params={**self.params, "layers": split})

    def stack(self) -> Model:
        """The same model with stacked layer weights (one scanned layer)."""
        if self.stacked:
            return self
        layers = jax.tree.map(lambda *xs: jnp.stack(xs), *self.params["layers"])
        return dataclasses.replace(self, params={**self.params, "layers": layers})
