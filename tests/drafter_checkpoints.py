"""Random EAGLE-3 and Medusa checkpoints with the names of the public ones, and what they draft by the papers' formulas,
in float64 over whole sequences."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

type Tensors = dict[str, np.ndarray]


def write(directory: Path, config: dict, tensors: Tensors) -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(
        {name: np.ascontiguousarray(x) for name, x in tensors.items()},
        directory / "model.safetensors",
    )
    return directory


def _random(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return (1.5 * rng.standard_normal(shape) / shape[-1] ** 0.5).astype(np.float32)


def _norm_weight(rng: np.random.Generator, size: int) -> np.ndarray:
    return (1 + 0.3 * rng.standard_normal(size)).astype(np.float32)


def _rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def _silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


@dataclass
class Eagle3Oracle:
    """A drafter for a target of `vocab` tokens and `dim` wide streams. `own_embedding`: in the checkpoint."""

    vocab: int
    dim: int
    draft_vocab: int = 41
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    mlp_dim: int = 50
    own_embedding: bool = False
    seed: int = 0
    eps: float = 1e-5
    theta: float = 10000.0

    def __post_init__(self) -> None:
        rng, E, H = np.random.default_rng(self.seed), self.dim, self.head_dim
        layer = "midlayer."
        self.tensors: Tensors = {
            "fc.weight": _random(rng, E, 3 * E),
            "norm.weight": _norm_weight(rng, E),
            "lm_head.weight": _random(rng, self.draft_vocab, E),
            f"{layer}hidden_norm.weight": _norm_weight(rng, E),
            f"{layer}input_layernorm.weight": _norm_weight(rng, E),
            f"{layer}post_attention_layernorm.weight": _norm_weight(rng, E),
            f"{layer}self_attn.q_proj.weight": _random(rng, self.heads * H, 2 * E),
            f"{layer}self_attn.k_proj.weight": _random(rng, self.kv_heads * H, 2 * E),
            f"{layer}self_attn.v_proj.weight": _random(rng, self.kv_heads * H, 2 * E),
            f"{layer}self_attn.o_proj.weight": _random(rng, E, self.heads * H),
            f"{layer}mlp.gate_proj.weight": _random(rng, self.mlp_dim, E),
            f"{layer}mlp.up_proj.weight": _random(rng, self.mlp_dim, E),
            f"{layer}mlp.down_proj.weight": _random(rng, E, self.mlp_dim),
        }
        known = np.sort(rng.choice(self.vocab, self.draft_vocab, replace=False))
        self.tensors["d2t"] = (known - np.arange(self.draft_vocab)).astype(np.int64)
        self.tensors["t2d"] = np.isin(np.arange(self.vocab), known)
        self.target_ids = known
        if self.own_embedding:
            self.tensors["embed_tokens.weight"] = rng.standard_normal((self.vocab, E)).astype(
                np.float32
            )

    @property
    def config(self) -> dict:
        return dict(
            architectures=["LlamaForCausalLMEagle3"],
            model_type="llama",
            vocab_size=self.vocab,
            draft_vocab_size=self.draft_vocab,
            hidden_size=self.dim,
            intermediate_size=self.mlp_dim,
            num_hidden_layers=1,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            hidden_act="silu",
            rms_norm_eps=self.eps,
            rope_theta=self.theta,
            max_position_embeddings=64,
        )

    def logits(
        self,
        token_ids: Sequence[int],
        streams: np.ndarray,
        embed: np.ndarray,
        num_drafts: int,
    ) -> list[np.ndarray]:
        """Of each draft, [draft_vocab].

        Args:
            token_ids: n + 1 tokens, the last of which the target hasn't computed.
            streams: [n, 3 * E] of the target, over the others.
            embed: the target's.
        """
        embed = self.tensors.get("embed_tokens.weight", embed)
        hidden = streams.astype(np.float64) @ self.tensors["fc.weight"].T.astype(np.float64)
        following = list(token_ids[1:])
        found = []
        for _ in range(num_drafts):
            out = self._layer(embed[following].astype(np.float64), hidden)
            last = _rms_norm(out[-1], self.tensors["norm.weight"], self.eps)
            found.append(self.tensors["lm_head.weight"] @ last)
            following.append(int(self.target_ids[found[-1].argmax()]))
            hidden = np.concatenate([hidden, out[-1:]])
        return found

    def drafts(self, *args, **kwargs) -> list[int]:
        return [int(self.target_ids[x.argmax()]) for x in self.logits(*args, **kwargs)]

    def _layer(self, embedded: np.ndarray, hidden: np.ndarray) -> np.ndarray:
        t = {name.removeprefix("midlayer."): x for name, x in self.tensors.items()}

        def normed(x: np.ndarray, name: str) -> np.ndarray:
            return _rms_norm(x, t[f"{name}.weight"], self.eps)

        x = np.concatenate(
            [normed(embedded, "input_layernorm"), normed(hidden, "hidden_norm")], axis=1
        )
        n, N, K, H = len(x), self.heads, self.kv_heads, self.head_dim
        q, k, v = (
            (x @ t[f"self_attn.{p}_proj.weight"].T).reshape(n, -1, H).swapaxes(0, 1) for p in "qkv"
        )
        q, k = self._rotated(q), self._rotated(k)
        k, v = (np.repeat(y, N // K, axis=0) for y in (k, v))
        scores = q @ k.swapaxes(1, 2) / H**0.5
        scores[:, np.triu(np.ones((n, n), bool), 1)] = -np.inf
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        attended = (weights / weights.sum(-1, keepdims=True)) @ v
        hidden = hidden + attended.swapaxes(0, 1).reshape(n, N * H) @ t["self_attn.o_proj.weight"].T
        y = normed(hidden, "post_attention_layernorm")
        gated = _silu(y @ t["mlp.gate_proj.weight"].T) * (y @ t["mlp.up_proj.weight"].T)
        return hidden + gated @ t["mlp.down_proj.weight"].T

    def _rotated(self, x: np.ndarray) -> np.ndarray:
        half = self.head_dim // 2
        angles = np.arange(x.shape[1])[:, None] * self.theta ** (-np.arange(half) / half)
        a, b = x[..., :half], x[..., half:]
        return np.concatenate(
            [a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)], -1
        )


@dataclass
class MedusaOracle:
    """Heads on hidden states `dim` wide; `converted`: with the names of vLLM's conversion, else with the authors'."""

    vocab: int
    dim: int
    heads: int = 4
    blocks: int = 2
    converted: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        rng, E = np.random.default_rng(self.seed), self.dim
        self._blocks = [
            [(_random(rng, E, E), 0.3 * _random(rng, E)) for _ in range(self.blocks)]
            for _ in range(self.heads)
        ]
        self._heads = [_random(rng, self.vocab, E) for _ in range(self.heads)]

    @property
    def config(self) -> dict:
        if self.converted:
            names = dict(num_heads=self.heads, num_hidden_layers=self.blocks)
            return names | dict(vocab_size=self.vocab, hidden_size=self.dim)
        return dict(medusa_num_heads=self.heads, medusa_num_layers=self.blocks)

    @property
    def tensors(self) -> Tensors:
        found: Tensors = {}
        for i, (blocks, head) in enumerate(zip(self._blocks, self._heads, strict=True)):
            for j, (weight, bias) in enumerate(blocks):
                prefix = f"blocks.{i}.layers.{j}." if self.converted else f"{i}.{j}.linear."
                found |= {f"{prefix}weight": weight, f"{prefix}bias": bias}
            found[f"lm_heads.{i}.weight" if self.converted else f"{i}.{self.blocks}.weight"] = head
        return found

    def logits(self, hidden: np.ndarray, num_drafts: int) -> list[np.ndarray]:
        """Of each draft, [vocab], given the target's last hidden state [dim]."""
        found = []
        for blocks, head in zip(self._blocks[:num_drafts], self._heads, strict=False):
            x = hidden.astype(np.float64)
            for weight, bias in blocks:
                x = x + _silu(weight @ x + bias)
            found.append(head @ x)
        return found

    def drafts(self, hidden: np.ndarray, num_drafts: int) -> list[int]:
        return [int(x.argmax()) for x in self.logits(hidden, num_drafts)]
