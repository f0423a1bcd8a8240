"""Qwen3.5 on bound ops: what is computed, nothing of how."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import gcd
from typing import TYPE_CHECKING, Any

from hal import ops
from hal.batch import make_batch
from hal.errors import CheckpointError, DivisionError, HalError
from hal.formats import Scheme, Tensor
from hal.ops import Projection
from hal_models import PAGE_SIZE
from hal_models.qwen3_5.config import Config, Kind

MOST_DRAFTS = 7

if TYPE_CHECKING:
    import torch

    from hal.batch import Batch
    from hal.runtime import Runtime

    Pair = tuple[torch.Tensor, torch.Tensor]
    State = tuple[torch.Tensor, ...]


class Shares:
    """This rank's share of each size; what does not divide is an error."""

    def __init__(self, cfg: Config, world: int) -> None:
        self.cfg, self.world = cfg, world
        self.key_heads = self.of("key heads", cfg.key_heads)
        self.value_heads = self.of("value heads", cfg.value_heads)
        self.heads = self.of("attention heads", cfg.heads)
        self.vocab = self.of("vocabulary", cfg.vocab)
        self.intermediate = self.of("expert intermediate" if cfg.experts else "intermediate", cfg.intermediate)
        self.shared = self.of("shared expert intermediate", cfg.shared_intermediate)
        # ranks beyond the KV heads hold copies of them
        self.copies = max(1, world // cfg.kv_heads)
        self.kv_heads = self.of("KV heads", cfg.kv_heads * self.copies)

    def of(self, what: str, count: int) -> int:
        if count % self.world:
            raise DivisionError(f"{self.cfg.name}: {what}: {count} over {self.world} ranks leaves {count % self.world}")
        return count // self.world


class GatedDeltaNet:
    """A linear-attention mixer; ``draft`` tokens after the last one can be verified."""

    def __init__(self, cfg: Config, share: Shares, rt: Runtime, name: str, draft: int = 0) -> None:
        form, world = Tensor(cfg.dtype), share.world
        sizes: dict[str, Any] = {
            "key_heads": share.key_heads,
            "value_heads": share.value_heads,
            "key_head_dim": cfg.key_head_dim,
            "value_head_dim": cfg.value_head_dim,
            "conv_width": cfg.conv_width,
            "dtype": cfg.dtype,
            "state_dtype": cfg.state_dtype,
        }
        key, value = share.key_heads * cfg.key_head_dim, share.value_heads * cfg.value_head_dim
        scheme = alone(cfg.scheme(f"{name}.out_proj"), cfg.hidden, value)
        out = ops.Linear(columns=value, rows=cfg.hidden, x=form, scheme=scheme, dtype=cfg.dtype, world=world)
        self.out_proj = rt.bind(out, f"{name}.out_proj", fed=True)
        self.core = rt.bind_group(
            name=f"{name}.core",
            feeds=self.out_proj,
            prefill=ops.GatedDeltaPrefill(**sizes, eps=cfg.eps),
            decode=ops.GatedDeltaDecode(**sizes, eps=cfg.eps),
            verify=ops.GatedDeltaVerify(**sizes, eps=cfg.eps, queries=draft + 1) if draft else None,
        )
        widths = (
            ("q", key, "qkv"),
            ("k", key, "qkv"),
            ("v", value, "qkv"),
            ("z", value, "z"),
            ("b", share.value_heads, "b"),
            ("a", share.value_heads, "a"),
        )
        # q, k, v and z have blocks alike, so that they are one product
        beside = {"qkv": (key, value), "z": (key, value), "b": (share.value_heads,), "a": (share.value_heads,)}
        parts = tuple(
            Projection(
                part,
                rows,
                output,
                held(cfg.scheme(f"{name}.in_proj_{output}"), *beside[output], columns=cfg.hidden),
                inputs=cfg.inputs(f"{name}.in_proj_{output}"),
            )
            for part, rows, output in widths
        )
        opens = ops.InProj(hidden=cfg.hidden, parts=parts, dtype=cfg.dtype, eps=cfg.eps, world=world)
        self.in_proj = rt.bind(opens, f"{name}.in_proj")
        self.state = self.core

    def __call__(self, partial: torch.Tensor, residual: torch.Tensor, state: State, batch: Batch) -> Pair:
        projected, residual = self.in_proj(partial, residual)
        core = getattr(self.core, batch.mode)
        # what is pending is the verify op's alone
        state = state if batch.mode == "verify" else state[:2]
        return self.out_proj(core(projected, state, batch)), residual

    def flush(self, state: State, batch: Batch) -> None:
        """Apply what is pending: a verify step of no rows."""
        import torch

        op: Any = self.core.choices["verify"].op
        (projected,), kind = op.signature().args, getattr(torch, op.dtype)
        nothing = tuple(torch.empty(0, a.shape[1], dtype=kind, device=batch.slots.device) for a in projected.items)
        self.core.verify(nothing, state, batch)


class Attention:
    """A full-attention mixer with an output gate."""

    def __init__(self, cfg: Config, share: Shares, rt: Runtime, name: str, draft: int = 0) -> None:
        form, world = Tensor(cfg.dtype), share.world
        pages: dict[str, Any] = {
            "kv_heads": share.kv_heads,
            "head_dim": cfg.head_dim,
            "page_size": PAGE_SIZE,
            "dtype": cfg.dtype,
        }
        width, kv_width = share.heads * cfg.head_dim, share.kv_heads * cfg.head_dim
        scheme = alone(cfg.scheme(f"{name}.o_proj"), cfg.hidden, width)
        out = ops.Linear(columns=width, rows=cfg.hidden, x=form, scheme=scheme, dtype=cfg.dtype, world=world)
        self.o_proj = rt.bind(out, f"{name}.o_proj", fed=True)
        self.core = rt.bind_group(
            name=f"{name}.core",
            feeds=self.o_proj,
            prefill=ops.AttentionPrefill(heads=share.heads, **pages),
            decode=ops.AttentionDecode(heads=share.heads, **pages),
            verify=ops.AttentionVerify(heads=share.heads, **pages, queries=draft + 1) if draft else None,
            rope=ops.QKNormRope(
                heads=share.heads,
                rotary_dim=cfg.rotary_dim,
                theta=cfg.theta,
                sections=cfg.sections,
                eps=cfg.eps,
                **pages,
            ),
        )
        parts = tuple(
            Projection(
                part,
                rows,
                "qkv",
                held(cfg.scheme(f"{name}.{part}_proj"), 2 * width, kv_width, columns=cfg.hidden),
                copies,
                cfg.inputs(f"{name}.{part}_proj"),
            )
            for part, rows, copies in (
                ("q", 2 * width, 1),
                ("k", kv_width, share.copies),
                ("v", kv_width, share.copies),
            )
        )
        opens = ops.NormLinear(hidden=cfg.hidden, parts=parts, dtype=cfg.dtype, eps=cfg.eps, world=world)
        self.qkv_proj = rt.bind(opens, f"{name}.qkv_proj")
        self.state = self.core

    def __call__(self, partial: torch.Tensor, residual: torch.Tensor, state: State, batch: Batch) -> Pair:
        qkv, residual = self.qkv_proj(partial, residual)
        q, gate = self.core.rope(qkv, state, batch)
        core = getattr(self.core, batch.mode)
        return self.o_proj(core(q, gate, state, batch)), residual


def held(scheme: Scheme | None, *rows: int, columns: int) -> Scheme | None:
    """The scheme of parts with these local rows that lie side by side."""
    return scheme.by_rows().within(*rows, columns=columns) if scheme else None


def alone(scheme: Scheme | None, rows: int, columns: int) -> Scheme | None:
    """The scheme of one part that lies by itself."""
    return scheme.within(rows, columns=columns) if scheme else None


def one_scheme(cfg: Config, modules: Iterable[str]) -> Scheme | None:
    """The scheme of modules that are one matrix here. Errors: CheckpointError where they have several."""
    found = {cfg.scheme(module): module for module in modules}
    if len(found) > 1:
        listed = "; ".join(f"{module} {scheme or 'not quantized'}" for scheme, module in found.items())
        raise CheckpointError(f"{cfg.name}: expected modules of one matrix to be quantized alike, got {listed}")
    return next(iter(found))


def feed_forward(cfg: Config, share: Shares, name: str) -> ops.GatedMLP | ops.MoE:
    """The second half of a layer: dense, or experts beside a shared one."""
    sizes: dict[str, Any] = {
        "hidden": cfg.hidden,
        "intermediate": share.intermediate,
        "dtype": cfg.dtype,
        "eps": cfg.eps,
    }
    if not cfg.experts:
        wide = one_scheme(cfg, (f"{name}.{part}_proj" for part in ("gate", "up")))
        return ops.GatedMLP(
            **sizes, world=share.world,
            gate_up=held(wide, share.intermediate, columns=cfg.hidden),
            down=alone(cfg.scheme(f"{name}.down_proj"), cfg.hidden, share.intermediate),
        )  # fmt: skip
    matrices = ("gate_proj", "up_proj", "down_proj")
    routed = one_scheme(cfg, (f"{name}.experts.{e}.{matrix}" for e in range(cfg.experts) for matrix in matrices))
    shared = one_scheme(cfg, (f"{name}.shared_expert.{matrix}" for matrix in matrices))
    return ops.MoE(
        **sizes, experts=cfg.experts, top_k=cfg.top_k, shared_intermediate=share.shared,
        routed=_both(routed, cfg.hidden, share.intermediate), shared=_both(shared, cfg.hidden, share.shared),
        world=share.world,
    )  # fmt: skip


def _both(scheme: Scheme | None, hidden: int, intermediate: int) -> Scheme | None:
    """The scheme of gate and up, and of down, whose sides are the same two."""
    side = gcd(hidden, intermediate)
    return held(scheme, side, columns=side)


class Layer:
    """A mixer, then a feed-forward."""

    def __init__(self, cfg: Config, share: Shares, rt: Runtime, name: str, kind: Kind, draft: int = 0) -> None:
        self.mixer: GatedDeltaNet | Attention
        if kind == "linear_attention":
            self.mixer = GatedDeltaNet(cfg, share, rt, f"{name}.linear_attn", draft)
        else:
            self.mixer = Attention(cfg, share, rt, f"{name}.self_attn", draft)
        self.mlp = rt.bind(feed_forward(cfg, share, f"{name}.mlp"), f"{name}.mlp")

    def __call__(self, partial: torch.Tensor, residual: torch.Tensor, state: State, batch: Batch) -> Pair:
        return self.mlp(*self.mixer(partial, residual, state, batch))


class DraftHead:
    """The layer that drafts (MTP): from a token and the hidden row before it to the token after.

    ``hidden`` is the target's after its final norm, or for drafts of drafts this head's own. A row's
    position is that of its hidden row: rotation sees differences only.
    """

    def __init__(self, cfg: Config, share: Shares, rt: Runtime, embed: Any, head: Any, draft: int) -> None:
        scheme = head.choice.op.scheme
        sizes: dict[str, Any] = {"hidden": cfg.hidden, "dtype": cfg.dtype, "eps": cfg.eps, "world": rt.world}
        self.embed = embed
        self.opens = rt.bind(ops.DraftIn(**sizes), "mtp.fc")
        self.layer = Layer(cfg, share, rt, "mtp.layers.0", "full_attention", draft)
        self.head = rt.bind(ops.Head(vocab=share.vocab, **sizes, scheme=scheme), "mtp.head", shares=head, own=("norm",))
        self.pick = rt.bind(ops.ArgMax(vocab=cfg.vocab, dtype=cfg.dtype), "mtp.pick")
        # the target's final norm where no logits are wanted
        self.hidden = rt.bind(ops.AddRMSNorm(**sizes, out=Tensor(cfg.dtype)), "mtp.hidden", shares=head)

    def __call__(self, ids: torch.Tensor, hidden: torch.Tensor, state: State, batch: Batch) -> Pair:
        """The pair after the layer, for rows of next tokens and hidden rows; ``head`` takes it."""
        token, nothing = self.embed(ids)
        return self.layer(self.opens(token, hidden), nothing, state, batch)


class Qwen35:
    """The text model. ``new_state`` makes the pools that ``__call__`` is given.

    ``draft``: tokens that its draft head may draft in a step, 1 to 7, which ``accept`` then judges; 0: none.
    """

    def __init__(self, cfg: Config, rt: Runtime, draft: int = 0) -> None:
        if not 0 <= draft <= MOST_DRAFTS:
            raise HalError(f"draft: expected 0 (none) to {MOST_DRAFTS} tokens, got {draft}")
        cfg = cfg.served(rt)
        if cfg.quantization and (kv := cfg.quantization.kv_cache):
            rt.notes[f"keys and values: kept in {cfg.dtype}, for no kernel has pages in FP8; the file has {kv}"] = None
        self.cfg, self.runtime, self.draft = cfg, rt, draft
        self.shares = share = Shares(cfg, rt.world)
        self.embed = rt.bind(ops.Embed(vocab=share.vocab, hidden=cfg.hidden, dtype=cfg.dtype, world=rt.world), "embed")
        self.layers = [Layer(cfg, share, rt, f"layers.{i}", kind, draft) for i, kind in enumerate(cfg.layers)]
        scheme = None if cfg.tied else alone(cfg.scheme("lm_head"), share.vocab, cfg.hidden)
        sizes: dict[str, Any] = {"hidden": cfg.hidden, "dtype": cfg.dtype, "world": rt.world}
        self.head = rt.bind(
            ops.Head(**sizes, vocab=share.vocab, eps=cfg.eps, scheme=scheme),
            "head",
            shares=self.embed if cfg.tied else None,
        )
        self.sample = rt.bind(ops.Sample(vocab=cfg.vocab, dtype=cfg.dtype), "sample")
        self.mtp: DraftHead | None = None
        if draft:
            self.accept = rt.bind(ops.Accept(vocab=cfg.vocab, dtype=cfg.dtype), "accept")
            self.mtp = DraftHead(cfg, share, rt, self.embed, self.head, draft)

    def new_state(self, slots: int, pages: int) -> list[State]:
        """A pool for each layer: of sequences for linear attention, of KV pages for full; the draft head's last."""
        return [
            layer.mixer.state.new_state(slots if isinstance(layer.mixer, GatedDeltaNet) else pages)
            for layer in (*self.layers, *([self.mtp.layer] if self.mtp else []))
        ]

    def __call__(self, ids: torch.Tensor, state: list[State], batch: Batch) -> Pair:
        """The pair (partial, residual) after the last layer, ``[rows, hidden]``; ``head`` takes it."""
        partial, residual = self.embed(ids)
        for layer, pools in zip(self.layers, state, strict=False):
            partial, residual = layer(partial, residual, pools, batch)
        return partial, residual

    def flush(self, state: list[State], slots: Sequence[int], contexts: Sequence[int], accepted: Sequence[int]) -> None:
        """Apply to slots what the last verify step left pending, so that their states may be copied or kept.

        ``contexts``: tokens of each, the last ``accepted`` of which are pending. A slot that another sequence is
        given needs no flush. Errors: HalError for a model that does not draft, and for counts that cannot be.
        """
        if not self.draft:
            raise HalError("flush: nothing is pending in a model that does not draft")
        batch = make_batch("verify", [0] * len(slots), contexts, slots, accepted=accepted, device=self.runtime.place)
        self.runtime.begin(batch)
        for layer, pools in zip(self.layers, state, strict=False):
            if isinstance(layer.mixer, GatedDeltaNet):
                layer.mixer.flush(pools, batch)
